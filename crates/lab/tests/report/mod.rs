//! lab.html: its sections, captions and marks, from synthetic findings.

mod example;

use ballast_lab::Findings;
use ballast_lab::findings::*;
use ballast_lab::report::html;

/// The page without its style sheet.
fn body(html: &str) -> &str {
    html.split("</style>").nth(1).unwrap()
}

const SECTIONS: [&str; 14] = [
    "answers",
    "runs",
    "layers",
    "position",
    "sites",
    "attention",
    "decay",
    "indexer",
    "gradients",
    "training",
    "decoding",
    "protected",
    "l2norm",
    "notes",
];

#[test]
fn every_section_is_there_in_its_order() {
    let html = html(&example::findings());
    let places = SECTIONS.map(|id| html.find(&format!("<h2 id=\"{id}\">")).unwrap_or_else(|| panic!("{id}")));
    assert!(places.is_sorted(), "{places:?}");
    assert!(!html.contains("Nothing to draw"));
}

#[test]
fn a_page_has_no_section_without_measurements() {
    let empty = html(&Findings::default());
    assert!(!body(&empty).contains("<h2") && empty.contains("No policy was run"));
    let bare = Run { name: "bf16".into(), ..Run::default() };
    let html = html(&Findings { runs: vec![bare], ..Findings::default() });
    assert_eq!(html.matches("<h2").count(), 1);
    assert!(html.contains("<h2 id=\"runs\">") && !html.contains("Nothing to draw"));
}

#[test]
fn two_things_side_by_side_have_a_page_of_their_own() {
    let site = |site: &str, error: f64| SiteError { site: site.into(), error, ..SiteError::default() };
    let nothing = Spread { mean: f64::NAN, p99: f64::NAN, max: f64::NAN };
    let dump = Run {
        name: "their.safetensors".into(),
        kind: Kind::Dump,
        loss: f64::NAN,
        perplexity: f64::NAN,
        kl: nothing,
        top1_agreement: f64::NAN,
        first_difference: Some("layers.0.out".into()),
        sites: vec![site("embed", 0.0), site("layers.0.out", 0.1)],
        by_layer: vec![LayerError { layer: 0, error: 0.1 }],
        ..Run::default()
    };
    let page = |run: Run| html(&Findings { model: "ours".into(), runs: vec![run], ..Findings::default() });
    let shown = page(dump.clone());
    assert!(shown.contains("no logits, so outputs were not compared") && shown.contains("first differs at"));
    assert!(!body(&shown).contains("non-finite") && !body(&shown).contains("polic"), "{shown}");
    let agrees = page(Run { first_difference: None, ..dump.clone() });
    assert!(agrees.contains("agrees within the tolerance everywhere"));
    let lost = |site: &str| Some(NotFinite { site: site.into(), count: 1, dtype: "file".into() });
    let inside = page(Run { not_finite: lost("layers.0.out"), ..dump.clone() });
    assert!(inside.contains("outputs were not compared") && !inside.contains("outputs are non-finite"));
    let broken = Run { not_finite: lost("logits"), top1_agreement: 0.0, ..dump };
    assert!(page(broken).contains("outputs are non-finite"));
    let same = Run { kind: Kind::Checkpoint, name: "b".into(), ..Run::default() };
    assert!(page(same).contains("gives the same values everywhere"));
}

#[test]
fn each_section_alone_makes_a_page() {
    let all = example::findings;
    let alone: [(&str, Findings); 9] = [
        ("answers", Findings { answers: all().answers, ..Findings::default() }),
        ("attention", Findings { attention: all().attention, ..Findings::default() }),
        ("decay", Findings { decays: all().decays, ..Findings::default() }),
        ("training", Findings { training: all().training, ..Findings::default() }),
        ("decoding", Findings { decoding: all().decoding, ..Findings::default() }),
        ("protected", Findings { protected: all().protected, ..Findings::default() }),
        ("l2norm", Findings { l2norm: all().l2norm, ..Findings::default() }),
        ("notes", Findings { notes: all().notes, ..Findings::default() }),
        (
            "runs",
            Findings {
                runs: all().runs.into_iter().filter(|run| run.name != "f32").collect(),
                ..Findings::default()
            },
        ),
    ];
    for (id, findings) in alone {
        let html = html(&findings);
        assert!(html.contains(&format!("<h2 id=\"{id}\">")), "{id}");
        assert!(!body(&html).contains("NaN") && !body(&html).contains(">inf"), "{id}");
    }
}

#[test]
fn a_choice_that_changes_gradients_alone_is_not_said_to_change_nothing() {
    let mut findings = example::findings();
    let router = findings.runs.iter_mut().find(|run| run.name == "router").unwrap();
    router.gradient_error = Some(0.001);
    let html = html(&findings);
    for caption in ["<code>out_norm</code> changes no bit", "<code>router</code> changes gradients alone"] {
        assert!(body(&html).contains(caption), "{caption}");
    }
}

#[test]
fn each_plot_says_what_one_sees() {
    let html = html(&example::findings());
    for caption in [
        "The model read 8,192 tokens of the embedded text: once in f64, the reference, and once under \
         each of 20 policies.",
        "<code>logits=f16</code> produces non-finite values, first at <code>layers.7.self_attn.logits</code>. \
         <code>hf-bf16</code> has the largest error of the others: mean KL divergence 0.0210 nats",
        "Of single choices, <code>norms</code> matters most: mean KL divergence 0.00110 nats",
        "<code>out_norm</code> and <code>router</code> change no bit.",
        "Not drawn, equal to f32 after every layer: <code>out_norm</code> and <code>router</code>",
        "<code>A_log</code> grows with position: the error at tokens 1,025 to 2,048 is ",
        "In the reference the largest |logit| is 306, in layer 11, where neighbors are 2 apart in bf16 and 0.25 in f16",
        "144 heads: from 0.3",
        "hf-bf16, A_log=bf16,qk_product=bf16 and A_log",
        "27 tensors: 270 of 1,440 elements are not exact in bf16",
        "at 131,072 tokens the norm inside the kernel saves 4.7 GiB",
        "<code>model.<wbr>layers.<wbr>*.<wbr>linear_attn.<wbr>A_log<wbr></code>",
        "f32 floor: everything in f32",
    ] {
        assert!(body(&html).contains(caption), "{caption}");
    }
}

#[test]
fn text_from_outside_cannot_become_markup() {
    let mut findings = example::findings();
    let evil = "</title><script src=x>\"'".to_string();
    findings.model_type.clone_from(&evil);
    findings.input.source.clone_from(&evil);
    findings.reference.arithmetic.clone_from(&evil);
    for run in &mut findings.runs {
        run.name += &evil;
        run.what += &evil;
        run.first_difference = Some(evil.clone());
        run.not_finite = Some(NotFinite { site: evil.clone(), count: 1, dtype: evil.clone() });
        run.sites
            .iter_mut()
            .for_each(|site| (site.site, site.dtype) = (site.site.clone() + &evil, evil.clone()));
        run.gradients.iter_mut().for_each(|gradient| gradient.tensor += &evil);
    }
    findings
        .protected
        .iter_mut()
        .for_each(|tensor| (tensor.name, tensor.dtype) = (evil.clone(), evil.clone()));
    findings.decoding.iter_mut().for_each(|run| run.name += &evil);
    findings.training.iter_mut().flat_map(|training| &mut training.runs).for_each(|run| run.name += &evil);
    let html = html(&findings);
    assert!(!html.contains("<script") && !html.contains("<b>") && !html.contains("<another>"));
    assert!(html.contains("Hybrid-&lt;b&gt;0.8B&lt;/b&gt;") && html.contains("[U+202E]more"));
    assert_eq!(html.matches("</title><script").count(), 0);
}

#[test]
fn the_page_refers_to_nothing_outside_itself() {
    let html = html(&example::findings());
    for reference in ["http:", "https:", "//", "src=", "href=", "url(", "@import", "<link", "<script"] {
        assert!(!html.contains(reference), "{reference}");
    }
}

#[test]
fn the_same_findings_give_the_same_bytes() {
    assert_eq!(html(&example::findings()), html(&example::findings()));
}

#[test]
fn findings_where_nothing_is_finite_make_a_page_that_says_so() {
    let mut findings = example::findings();
    for run in &mut findings.runs {
        run.kl = Spread { mean: f64::NAN, p99: f64::INFINITY, max: f64::NAN };
        (run.loss, run.loss_difference, run.perplexity) = (f64::NAN, f64::NAN, f64::INFINITY);
        (run.top1_agreement, run.gradient_error) = (0.0, Some(f64::NAN));
        run.by_layer.iter_mut().for_each(|layer| layer.error = f64::NAN);
        run.sites.iter_mut().for_each(|site| (site.error, site.max_abs) = (f64::NAN, f64::INFINITY));
        run.by_position.iter_mut().for_each(|stretch| (stretch.kl, stretch.recurrence) = (f64::NAN, None));
        run.decay.iter_mut().for_each(|head| (head.rate_error, head.half_life) = (f64::NAN, f64::NAN));
        run.attention.iter_mut().for_each(|layer| layer.top_key_changed = f64::NAN);
        run.indexer.iter_mut().for_each(|layer| layer.overlap = f64::NAN);
        run.gradients.iter_mut().for_each(|gradient| gradient.cosine = f64::NAN);
    }
    findings.decays.iter_mut().for_each(|decay| decay.half_life = f64::INFINITY);
    let limits =
        |range: &mut LogitRange| (range.min, range.max, range.largest) = (f64::NAN, f64::NAN, f64::INFINITY);
    findings.attention.iter_mut().for_each(limits);
    let html = html(&findings);
    assert!(!body(&html).contains("NaN") && !body(&html).contains(">inf"));
    assert!(html.contains("No head has a finite half-life"));
    assert!(html.contains("No policy has a finite, nonzero divergence"));
}
