//! Hostile templates. Without the limits they overflow the stack, take all memory, or do not end.

use minijinja::context;
use serde_json::json;

use super::super::tokenizer::tests::golden;
use super::*;

fn templates(source: &str) -> Result<Templates> {
    Templates::new(&[("default", source)], Path::new("t"))
}

fn variables() -> Value {
    let messages = json!([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x"}]);
    context! { messages => Value::from_serialize(messages), big => "x".repeat(1 << 20) }
}

fn rendered(source: &str) -> Result<String> {
    templates(source)?.render("default", variables)
}

fn shows(source: &str, text: &str) {
    assert_eq!(rendered(source).unwrap(), text, "{source}");
}

/// Asserts that each template is refused with the file and the limit.
fn refused(sources: &[String], limit: &str) {
    for source in sources {
        let error = rendered(source).map(|text| text.len()).unwrap_err().to_string();
        assert!(error.starts_with("t: ") && error.contains(limit), "{error}\n{:.200}", source);
        assert!(error.contains("chat template"), "{error}");
    }
}

/// A template that nests a list `levels` deep in the namespace `ns`, then does something with it.
fn nested(levels: usize, then: &str) -> String {
    format!(
        "{{% set ns = namespace(x=[]) %}}{{% for i in range({levels}) %}}{{% set ns.x = [ns.x] %}}{{% endfor %}}{then}"
    )
}

#[test]
fn a_value_that_is_nested_too_deep_is_refused_whatever_is_done_with_it() {
    let uses = [
        "",
        "{{ ns.x }}",
        "{{ ns.x|tojson }}",
        "{{ ns.x|string }}",
        "{{ ns.x ~ '' }}",
        "{{ ns.x == [ns.x] }}",
    ];
    refused(&uses.map(|then| nested(60_000, then)), "nested more than 200 levels");
    refused(&[nested(200, "")], "nested more than 200 levels");
    shows(
        &nested(199, "{{ ns.x|tojson|length }} {{ ns.x|string|length }} {{ (ns.x ~ '')|length }}"),
        "400 400 400",
    );
    let maps =
        "{% set ns = namespace(x={}) %}{% for i in range(60000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}";
    refused(&[maps.into(), maps.replace("{'a': ns.x}", "dict(a=ns.x)")], "nested more than 200 levels");
}

#[test]
fn lazy_sequences_do_not_nest() {
    let chain = |next: &str| {
        format!(
            "{{% set ns = namespace(x=[[1, 2]]) %}}{{% for i in range(60000) %}}{{% set ns.x = {next} %}}{{% endfor %}}{{{{ ns.x|list }}}}"
        )
    };
    for next in ["ns.x[0:]", "ns.x|reverse", "ns.x * 1", "ns.x + []", "ns.x|map('reverse')", "ns.x[::-1]"] {
        shows(&chain(next), "[[1, 2]]");
    }
}

#[test]
fn namespaces_and_loops_cannot_contain_themselves() {
    let cycles = [
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
        "{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}{{ a|tojson }}",
        "{% set ns = namespace() %}{% set l = [ns] %}{% set ns.x = l %}{{ l }}",
        "{% for i in [1] %}{{ loop.changed(loop) }}{% endfor %}",
        "{% for i in [1] %}{{ loop.changed([loop]) }}{% endfor %}",
    ];
    refused(&cycles.map(String::from), "a namespace or loop cannot be stored");
    shows("{% for i in [1, 1, 2] %}{{ loop.changed(i, 'a') }} {% endfor %}", "True False True ");
}

#[test]
fn long_chains_in_the_source_are_refused() {
    let chains = [
        format!("{{{{ {}1 }}}}", "- ".repeat(30_000)),
        format!("{{{{ {}1 }}}}", "not ".repeat(30_000)),
        format!("{{{{ x{} }}}}", "+1".repeat(30_000)),
        format!("{{{{ x{} }}}}", "|upper".repeat(30_000)),
        format!("{{{{ x{} }}}}", ".a".repeat(30_000)),
        format!("{{{{ x{} }}}}", "[0]".repeat(30_000)),
        format!("{{{{ x{} }}}}", "()".repeat(30_000)),
        format!("{{{{ x{} }}}}", " is string".repeat(20_000)),
        format!("{{{{ x{} }}}}", " if x".repeat(30_000)),
        format!("{{% set x{} = 1 %}}", ".a".repeat(30_000)),
        format!("{{% set {}x = 1 %}}", "(".repeat(30_000)),
        format!("{{% filter upper{} %}}{{% endfilter %}}", "|upper".repeat(30_000)),
    ];
    refused(&chains, "more than 1000 words and signs in a tag, the limit");
    let alternatives = format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(20_000));
    refused(&[alternatives], "more than 500 `elif`, the limit");
    refused(&[" ".repeat(1 << 20)], "more than 262144, the limit");
}

/// The deepest templates that the limits admit: they need the most stack.
#[test]
fn the_deepest_templates_within_the_limits_fit_the_stack() {
    shows(&format!("{{{{ {}1 }}}}", "- ".repeat(990)), "1");
    shows(&format!("{{{{ {}messages is string }}}}", "not ".repeat(990)), "False");
    shows(&format!("{{{{ messages|length{} }}}}", "+1".repeat(490)), "492");
    shows(&format!("{{{{ 'a'{} }}}}", "|upper".repeat(490)), "A");
    shows(
        &format!("{{{{ messages{} }}}}", "[0:]".repeat(240)),
        rendered("{{ messages[0:] }}").unwrap().as_str(),
    );
    let alternatives =
        |body: &str| format!("{{% if x %}}{}{{% endif %}}", format!("{{% elif {body} %}}").repeat(500));
    shows(&alternatives("x"), "");
    shows(&format!("{{{{ {}1{} }}}}", "(".repeat(70), ")".repeat(70)), "1");
    shows(&format!("{}x{}", "{% if messages %}".repeat(140), "{% endif %}".repeat(140)), "x");
    let calls = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    refused(&[calls.into()], "recursion limit exceeded");
    let blocks = "{% block a %}{{ self.a() }}{% endblock %}";
    refused(&[blocks.into()], "recursion limit exceeded");
}

#[test]
fn strings_that_double_are_refused() {
    let doubling = |next: &str| {
        format!(
            "{{% set ns = namespace(a=messages[0].content) %}}{{% for i in range(60) %}}{{% set ns.a = {next} %}}{{% endfor %}}"
        )
    };
    for next in [
        "ns.a ~ ns.a",
        "ns.a + ns.a",
        "ns.a * 2",
        "[ns.a, ns.a]",
        "{'a': ns.a, 'b': ns.a}",
        "[ns.a, ns.a]|join",
        "'%s%s'|format(ns.a, ns.a)",
        "'{}{}'.format(ns.a, ns.a)",
        "ns.a|replace('l', ns.a)",
    ] {
        refused(&[doubling(next)], "value is larger than 32 MiB, the limit");
    }
    refused(&[doubling("[ns.a, ns.a]|string")], "value is larger than 32 MiB, the limit");
    let captured = "{% set ns = namespace(a='hello') %}{% for i in range(60) %}{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = b %}{% endfor %}";
    refused(&[captured.into()], "value is larger than 32 MiB, the limit");
}

#[test]
fn all_values_of_a_rendering_have_a_budget() {
    let budgets = [
        "{% for i in range(99999) %}{{ big }}{% endfor %}",
        "{% for i in range(99999) %}{% set a = big ~ i %}{% endfor %}",
        "{% for i in range(99999) %}{% set a = big|upper %}{% endfor %}",
        "{% for i in range(99999) %}{% set a = big.upper() %}{% endfor %}",
        "{% macro m() %}{{ big }}{% endmacro %}{% for i in range(99999) %}{% set a = m() %}{% endfor %}",
        "{% for i in range(99999) %}{% set a = big[1:] %}{% endfor %}",
        "{% for i in range(99999) %}{% set a = range(99999) %}{% endfor %}",
    ];
    refused(&budgets.map(String::from), "more than 512 MiB of values, the limit of a rendering");
    let raw = format!("{{% for i in range(99999) %}}{}{{% endfor %}}", "x".repeat(100_000));
    refused(&[raw], "more than 512 MiB of values");
}

#[test]
fn one_step_cannot_make_far_more_than_it_is_given() {
    let steps = [
        "{{ big|replace('', big) }}",
        "{{ big.replace('x', big) }}",
        "{{ big|join(big) }}",
        "{{ big.join(big) }}",
        "{{ big|indent(999999999999) }}",
        "{{ big|indent(width=999999999999) }}",
        "{{ [1]|batch(999999999999, 'x') }}",
        "{{ [1]|slice(999999999999, 'x') }}",
        "{{ '%999999999d'|format(1) }}",
        "{{ '%*d'|format(999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ [big] * 999999999999 }}",
        "{{ [big, messages] * 9223372036854775807 }}",
        "{{ big * 999999 }}",
        "{{ (range(99999)|list)|tojson(separators=[big, big]) }}",
        "{{ [1]|map('indent', 999999999999)|list }}",
        "{{ (range(99999)|list) * 99999 }}",
        "{{ dict(**{'a': [big] * 99}) }}",
    ];
    let larger = "value is larger than 32 MiB, the limit";
    refused(&steps.map(String::from), larger);
    refused(&[nested(190, "{{ ([ns.x] * 300)|tojson(indent=64) }}")], larger);
    refused(&["{% macro m() %}{% endmacro %}{{ m(*big, *big) }}".replace("big", "(big * 30)")], "512 MiB");
}

#[test]
fn constants_that_the_compiler_would_compute_are_refused() {
    let constants = [
        "{{ 'x' * 100000000 ~ 'x' * 100000000 }}",
        "{{ 100000000 * ('x' ~ 'y') }}",
        "{{ x ~ ([1] * 1000000000000 ~ '') }}",
        "{{ 'x' * 10 ** 8 }}",
        "{{ ('x' * 10000) * 10000 }}",
        "{{ (1, 2) * 1000000000 == [] }}",
    ];
    refused(&constants.map(String::from), "constants make more than 1048576 bytes, the limit");
    shows(
        "{{ '-' * 80 }}{{ 3 * 4 * 1.5 }}{{ ' ' * (messages|length * 2) }}",
        &format!("{}18.0    ", "-".repeat(80)),
    );
}

#[test]
fn calls_that_the_engine_cannot_take_are_errors() {
    refused(&["{% for i in [1] %}{{ loop.cycle() }}{% endfor %}".into()], "`cycle` needs arguments");
    refused(&["{% include 'default' %}".into()], "cannot include");
    refused(
        &["{{ range(-9223372036854775807, 9223372036854775807, -9223372036854775807) }}".into()],
        "too many elements",
    );
    refused(&["{{ debug() }}".into()], "debug is unknown");
    shows("{{ 'abc'.count('') }}{{ 'abab'.count('ab') }}", "42");
}

#[test]
fn slices_are_those_of_python() {
    for (slice, expected) in [
        ("[1:3]", "bc"),
        ("[-2:]", "de"),
        ("[:-2]", "abc"),
        ("[::2]", "ace"),
        ("[::-1]", "edcba"),
        ("[::-2]", "eca"),
        ("[0:5:-1]", ""),
        ("[5:0:-1]", "edcb"),
        ("[3:1:-1]", "dc"),
        ("[9:]", ""),
        ("[-9:2]", "ab"),
        ("[4:1]", ""),
        ("[:-9:-1]", "edcba"),
        ("[-9::-1]", ""),
        ("[1::9223372036854775807]", "b"),
    ] {
        shows(&format!("{{{{ 'abcde'{slice} }}}}"), expected);
        shows(&format!("{{{{ ('abcde'|list){slice}|join }}}}"), expected);
    }
    assert!(rendered("{{ 'a'[::0] }}").unwrap_err().to_string().contains("step size of 0"));
}

#[test]
fn jumps_go_where_they_went_before_checks_were_added() {
    let source = "{% for i in range(6) if i % 2 == 0 %}{% if i == 2 %}a{% continue %}{% elif i == 4 %}b{% break %}{% else %}c{% endif %}{{ i and i + 1 or 'z' }}{% else %}no{% endfor %}|\
        {% for i in [] %}{% else %}none{% endfor %}|{% for i in [[1, []], [2, [[3, []]]]] recursive %}{{ i[0] }}{{ loop(i[1]) }}{% endfor %}|\
        {% macro m(a, b='x' ~ 'y') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}{% call m(*[1, 2]) %}!{% endcall %}|\
        {% set b | upper %}q{{ 1 + 1 }}{% endset %}{{ b }}{{ 1 < 2 < 3 }}{% filter upper %}w{% endfilter %}{% block k %}[{{ 1 ~ 2 }}]{% endblock %}";
    shows(source, "czab|none|123|1xy12!|Q2TrueW[12]");
}

#[test]
fn every_filter_of_the_engine_is_checked_or_removed() {
    let environment = super::environment();
    let state = environment.empty_state();
    // Filters of minijinja 2.24 with its feature `json`.
    let all = "abs attr batch bool capitalize chain count d default dictsort e escape first float format groupby indent \
        int items join last length lines list lower map max min pprint reject rejectattr replace reverse round safe \
        select selectattr slice sort split string sum title tojson trim unique upper urlencode zip";
    let defined = |name: &&str| {
        let result = state.apply_filter(name, &[]);
        !matches!(result, Err(error) if error.kind() == ErrorKind::UnknownFilter)
    };
    let own: Vec<&str> = super::filters::table().iter().map(|(name, ..)| *name).chain(["tojson"]).collect();
    for name in all.split_whitespace().filter(defined) {
        assert!(own.contains(&name), "{name}");
    }
}

#[test]
fn real_templates_and_long_conversations_are_far_from_the_limits() {
    for case in golden("chats.json").as_array().unwrap() {
        let template = templates(case["template"].as_str().unwrap()).unwrap();
        if case["name"] == "details" {
            continue; // its conversation has more fields
        }
        // 600 messages of 16 KB.
        let turns = ["user", "assistant"].map(|role| json!({"role": role, "content": "word ".repeat(3200)}));
        let messages: Vec<_> = turns.into_iter().cycle().take(600).collect();
        let text = template.render("default", || context! { messages => Value::from_serialize(&messages) });
        assert!(text.unwrap().len() > 9_000_000, "{}", case["name"]);
    }
}
