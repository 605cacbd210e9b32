use super::*;
use crate::metrics::{Evaluation, RankUse, Step};

/// A synthetic run; `loss` gives the loss of each step.
fn run(steps: u64, loss: impl Fn(u64) -> f64) -> Vec<MetricsEntry> {
    let mut records = Vec::new();
    for step in 1..=steps {
        let noise = ((step * 7919) % 101) as f64 / 101.0;
        let group_norms = ["embedding", "linear_attention", "mlp"]
            .iter()
            .map(|name| (name.to_string(), 0.1 + noise))
            .collect();
        records.push(MetricsEntry::Step(Step {
            step,
            loss: loss(step),
            learning_rate: 1e-3 / step as f64,
            gradient_norm: 1.0 + noise,
            group_norms,
            tokens: 2048,
            trained_tokens: 2000,
            seconds: 0.1 + 0.01 * noise,
            peak_memory: (1 << 30) + step.min(10),
            ..Step::default()
        }));
        if step % steps.div_ceil(10) == 0 {
            let accuracy = step as f64 / steps as f64;
            records.push(MetricsEntry::Evaluation(Evaluation {
                step,
                loss: loss(step) + 0.01,
                accuracy,
                tokens: 99,
                ..Evaluation::default()
            }));
        }
    }
    records
}

fn report(records: &[MetricsEntry]) -> Report<'_> {
    let row = |index: usize| LedgerRow {
        name: format!("model.layers.{index}.linear_attn.A_log"),
        dtype: "F32".into(),
        checks: 300,
        first_checksum: "01".into(),
        last_checksum: "02".into(),
        live: true,
        fine: index != 3,
    };
    Report {
        title: "A <run>",
        summary: vec![("Model".into(), "tiny & hybrid".into())],
        records,
        ledger: (0..6).map(row).collect(),
        plan: vec![PlanRow { what: "parameters".into(), bytes: 1 << 29 }],
        measured_peak: 1 << 30,
        samples: vec![Sample {
            step: 300,
            prompt: "</dd><script>alert(1)</script>".into(),
            expected: Some("4\u{7}".into()),
            answer: "\u{202e}5".into(),
            right: Some(false),
        }],
        config: "[model]\nname = \"<b>\"\n",
    }
}

fn falling(step: u64) -> f64 {
    5.55 / step as f64
}

/// The page without its style sheet.
fn body(html: &str) -> &str {
    html.split("</style>").nth(1).unwrap()
}

#[test]
fn each_plot_says_what_one_sees() {
    let records = run(300, falling);
    let html = html(&report(&records));
    for caption in [
        "300 steps on 614,400 tokens in 31.5 s; the last loss is 0.0185, the lowest validation loss 0.0285.",
        "The loss fell from 5.55 to 0.0185 over 299 steps; the lowest validation loss, 0.0285, is at step 300.",
        "The best accuracy, 100.0 % of the validation tokens, is at step 300.",
        "The peak, 1e-3, is at step 1; the last value is 3.33e-6.",
        "The median norm is 1.50; the largest, 1.99, is at step",
        "The measured peak, 1.0 GiB, is 100.0 % above the plan of 512.0 MiB.",
        "6 tensors, 1,800 checks: <span class=\"bad\">1 tensor failed a check</span>.",
        "<code>model.layers.*.linear_attn.A_log</code>",
        "0 of 1 correct",
    ] {
        assert!(html.contains(caption), "{caption}");
    }
}

#[test]
fn ranks_are_shown_with_their_waiting_and_memory() {
    let mut records = run(40, falling);
    let of_ranks = |ranks: usize| RankUse {
        waiting: (0..ranks).map(|rank| rank as f64 / 100.0).collect(),
        peak_memory: (0..ranks).map(|rank| (rank as u64 + 1) << 20).collect(),
        sent: [("gradients".to_string(), 3 << 20), ("scalars".to_string(), 512)].into(),
    };
    assert!(!html(&report(&records)).contains("id=\"ranks\""));
    let set = |records: &mut [MetricsEntry], from: u64, ranks: usize| {
        for record in records {
            if let MetricsEntry::Step(step) = record
                && step.step >= from
            {
                step.ranks = Some(of_ranks(ranks));
            }
        }
    };
    set(&mut records, 10, 4);
    set(&mut records, 20, 3);
    let page = html(&report(&records));
    for text in [
        "3 ranks; all together sent 3.0 MiB in the last step (gradients 3.0 MiB, scalars 512 B).",
        "On average a rank waited for 1.0 % of a step; rank 2 most, 2.0 %.",
        "<td class=\"number\">2</td><td class=\"number\">2.0 %</td><td class=\"number\">3.0 MiB</td>",
    ] {
        assert!(page.contains(text), "{text}");
    }
    set(&mut records, 1, 100);
    let page = html(&report(&records));
    assert!(
        page.contains("The 32 ranks that waited least and most") && page.contains("rank 99 most, 99.0 %")
    );
    assert!(!page.contains("<td class=\"number\">50</td>"));
}

#[test]
fn text_from_outside_cannot_become_markup() {
    let mut records = run(30, falling);
    let text = "</title><script>".to_string();
    records.push(MetricsEntry::Event(Event { step: 7, what: "<i>".into(), text }));
    let html = html(&report(&records));
    assert!(!html.contains("<script") && !html.contains("<b>") && !html.contains("<i>"));
    assert!(html.contains("A &lt;run&gt;") && html.contains("tiny &amp; hybrid"));
    assert!(html.contains("4[U+0007]") && html.contains("[U+202E]5"));
}

#[test]
fn the_page_refers_to_nothing_outside_itself() {
    let records = run(30, falling);
    let html = html(&report(&records));
    for reference in ["http:", "https:", "//", "src=", "href=", "url(", "@import", "<link", "<script"] {
        assert!(!html.contains(reference), "{reference}");
    }
}

#[test]
fn the_same_report_gives_the_same_bytes() {
    let records = run(50, falling);
    assert_eq!(html(&report(&records)), html(&report(&records)));
}

#[test]
fn a_hundred_thousand_steps_fit_in_two_megabytes_and_the_spike_is_there() {
    let records = run(100_000, |step| if step == 61_803 { 40.0 } else { 3.0 + (step % 17) as f64 / 100.0 });
    let html = html(&report(&records));
    assert!(html.len() < 2_000_000, "{}", html.len());
    let calm = run(100_000, |step| 3.0 + (step % 17) as f64 / 100.0);
    assert!(html.contains("to 40.0") && !super::html(&report(&calm)).contains("to 40.0"));
    // Only the spike comes this close to the upper edge.
    let heights = html.split("class=\"line pale c0\" d=\"").nth(1).unwrap().split('"').next().unwrap();
    let heights = heights.split(['M', 'L']).filter_map(|point| point.split(' ').nth(1)?.parse::<u32>().ok());
    assert_eq!(heights.filter(|height| *height < 100).count(), 1);
}

#[test]
fn a_run_that_diverged_has_a_page_that_says_so() {
    let records = run(300, |step| if step < 200 { falling(step) } else { f64::NAN });
    let html = html(&report(&records));
    assert!(html.contains("and is non-finite from step 200 on; the lowest validation loss"));
    assert!(html.contains("train: 101 values are non-finite, the first at step 200"));
    assert!(html.contains("the last loss is non-finite"));
    assert!(!body(&html).contains("NaN") && !body(&html).contains("inf "));
}

#[test]
fn nothing_and_next_to_nothing_make_a_page() {
    let all_lost = run(5, |_| f64::INFINITY);
    let event = [MetricsEntry::Event(Event { step: 0, what: "fault".into(), text: "at once".into() })];
    let evaluation = [MetricsEntry::Evaluation(Evaluation {
        step: 0,
        loss: 5.0,
        accuracy: 0.0,
        tokens: 1,
        ..Evaluation::default()
    })];
    for records in [&[][..], &event, &evaluation, &run(1, falling), &all_lost] {
        let empty = Report {
            title: "",
            summary: vec![],
            records,
            ledger: vec![],
            plan: vec![],
            measured_peak: 0,
            samples: vec![],
            config: "",
        };
        let html = html(&empty);
        assert!(html.ends_with("</html>\n") && !body(&html).contains("NaN"), "{records:?}");
    }
    assert!(html(&report(&all_lost)).contains("The loss was never finite"));
}
