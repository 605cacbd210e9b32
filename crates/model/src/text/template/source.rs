//! Limits of what is parsed.
//!
//! minijinja's parser bounds the depth of parentheses and blocks. It recurses without a bound over signs
//! (`- - x`) and `elif`, and builds trees as deep as a chain of operators, filters or attributes is long. All
//! of these are bounded by the words of a tag and the number of `elif`.

use minijinja::machinery::{Token, tokenize};

/// Bytes of a template; those of known models have at most 40 KB.
const SOURCE: usize = 256 << 10;

/// Words, numbers, strings and signs of one tag. The longest tag of the templates in fixtures/text has 33.
const TAG: usize = 1000;

/// `elif` of a template; the parser and the compiler recurse over those of one `if`.
const ELIFS: usize = 500;

/// Bytes of the strings and lists that constants make (`'-' * 80`): minijinja computes them while it compiles.
const CONSTANTS: usize = 1 << 20;

/// Checks the limits. The words are those of minijinja's own lexer, so strings, comments and raw blocks are
/// what the parser takes them for.
pub(super) fn check(source: &str) -> Result<(), String> {
    if source.len() > SOURCE {
        return Err(format!("it has {} bytes, more than {SOURCE}, the limit", source.len()));
    }
    let (mut words, mut elifs, mut constants) = (0, 0, Constants::default());
    for token in tokenize(source, false, Default::default(), Default::default()) {
        // The parser will say what is wrong.
        let Ok((token, place)) = token else { break };
        match token {
            Token::VariableStart | Token::BlockStart => words = 0,
            Token::Ident("elif") => elifs += 1,
            _ => {}
        }
        words += 1;
        constants.add(&token);
        let over = [(words, TAG, "words and signs in a tag"), (elifs, ELIFS, "`elif`")];
        if let Some((_, limit, what)) = over.into_iter().find(|(count, limit, _)| count > limit) {
            return Err(format!("line {}: more than {limit} {what}, the limit", place.start_line));
        }
        if constants.bytes > CONSTANTS {
            let line = place.start_line;
            return Err(format!("line {line}: constants make more than {CONSTANTS} bytes, the limit"));
        }
    }
    Ok(())
}

/// Upper bound of the strings and lists that the compiler computes from constants.
///
/// An expression of constants is a run of words in which no name occurs. A number in it is at
/// most the product of the run's numbers, where operators and truth values count 2; a string or list is at
/// most that many times what is written.
#[derive(Default)]
struct Constants {
    /// Sum over the runs that repeat a string or list.
    bytes: usize,
    run: Run,
}

#[derive(Default)]
struct Run {
    words: usize,
    bytes: usize,
    product: usize,
    /// True if something is multiplied.
    repeats: bool,
    /// True if there is something to repeat: a string or a list.
    repeatable: bool,
}

/// Bytes that a constant takes at most beside the text of a string: the digits of a number.
const CONSTANT: usize = 40;

impl Constants {
    fn add(&mut self, token: &Token) {
        let run = &mut self.run;
        let (text, factor) = match token {
            Token::Str(text) => (text.len(), 1),
            Token::String(text) => (text.len(), 1),
            Token::Int(number) => (0, usize::try_from(*number).unwrap_or(usize::MAX).max(2)),
            Token::Int128(_) | Token::Float(_) | Token::Pow => (0, usize::MAX),
            Token::Plus | Token::Minus | Token::Mul | Token::Div | Token::FloorDiv | Token::Mod => (0, 2),
            Token::Tilde | Token::Eq | Token::Ne | Token::Gt | Token::Gte | Token::Lt | Token::Lte => (0, 2),
            Token::Ident("true" | "True" | "false" | "False" | "not" | "and" | "or" | "in") => (0, 2),
            Token::Ident("none" | "None") => (0, 1),
            Token::Comma | Token::Colon | Token::BracketOpen | Token::BracketClose => (0, 1),
            Token::ParenOpen | Token::ParenClose | Token::BraceOpen | Token::BraceClose => (0, 1),
            _ => return self.end(),
        };
        // At the start of a run, the left operand is no constant.
        run.repeats |= matches!(token, Token::Mul) && run.words > 0;
        run.repeatable |=
            matches!(token, Token::Str(_) | Token::String(_) | Token::BracketOpen | Token::Comma);
        run.words += 1;
        run.bytes += text + CONSTANT;
        run.product = run.product.max(1).saturating_mul(factor);
    }

    fn end(&mut self) {
        let run = std::mem::take(&mut self.run);
        if run.repeats && run.repeatable {
            self.bytes = self.bytes.saturating_add(run.bytes.saturating_mul(run.product));
        }
    }
}

/// Replaces `{% generation %}` blocks, which mark the assistant's text for training, by `{% if true %}`
/// blocks.
pub(super) fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        out += before;
        out += "{%";
        rest = tag;
        let Some((inside, _)) = tag.split_once("%}") else { continue };
        let replacement = match inside.trim_matches(['-', '+']).trim() {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        let name = inside.trim_matches(['-', '+']).trim();
        out += &inside.replacen(name, replacement, 1);
        rest = &tag[inside.len()..];
    }
    out + rest
}
