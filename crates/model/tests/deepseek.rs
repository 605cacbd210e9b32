//! DeepSeek-V3.2 end to end: packing, recomputation, precision, the indexers' loss.

use std::collections::BTreeMap;
use std::path::Path;

use ballast_checkpoint::tensor_file::TensorFile;
use ballast_model::probe::Recorder;
use ballast_model::{Batch, IndexerLoss, IndexerStage, LossOptions, Model, Precision, Recompute, StepLoss};

const STAGES: [IndexerStage; 2] = [IndexerStage::Dense, IndexerStage::Sparse];

fn load(precision: Precision) -> (Model, Vec<u32>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/deepseek_v32");
    let golden = TensorFile::open(&folder.join("golden.safetensors")).unwrap();
    let ids = golden.integers("input_ids").unwrap().values.iter().map(|id| *id as u32).collect();
    (Model::load(&folder, |_| Ok(precision)).unwrap(), ids)
}

type Named = BTreeMap<String, Vec<f32>>;

fn backward(model: &Model, batch: &Batch, options: &LossOptions, recompute: Recompute) -> (StepLoss, Named) {
    let mut grads = model.grads();
    let loss = model.forward_backward(&mut grads, batch, options, recompute, None).unwrap();
    let named = model.named_grads(&grads, None).unwrap();
    (loss, named.into_iter().map(|tensor| (tensor.name, tensor.values)).collect())
}

fn with_indexer(stage: IndexerStage) -> LossOptions {
    LossOptions { indexer: Some(IndexerLoss { scale: 0.5, stage }), ..LossOptions::default() }
}

/// RMS of a - b divided by the RMS of b.
fn ratio(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let sum =
        |f: &dyn Fn(f64, f64) -> f64| a.iter().zip(b).map(|(a, b)| f(*a as f64, *b as f64)).sum::<f64>();
    (sum(&|a, b| (a - b) * (a - b)) / (sum(&|_, b| b * b) + 1e-30)).sqrt()
}

fn bits(named: &Named) -> Vec<Vec<u32>> {
    named.values().map(|values| values.iter().map(|x| x.to_bits()).collect()).collect()
}

fn is_indexer(name: &str) -> bool {
    name.contains(".indexer.")
}

#[test]
fn packed_sequences_give_what_each_gives_alone() {
    let (model, ids) = load(Precision::f32());
    let ends = [0, 29, 34, 51, 58];
    let packed = Batch::packed(ids.clone(), ends.to_vec()).unwrap();
    let options = LossOptions { scale: Some(1.0 / packed.counted() as f32), ..LossOptions::default() };
    let (together, grads) = backward(&model, &packed, &options, Recompute::None);
    let logits = model.logits(&packed, None).unwrap();
    let (mut apart, mut loss, mut sums) = (Vec::new(), 0.0, Named::new());
    for ends in ends.windows(2) {
        let one = Batch::packed(ids[ends[0]..ends[1]].to_vec(), vec![0, ends[1] - ends[0]]).unwrap();
        apart.extend(model.logits(&one, None).unwrap());
        let (one, grads) = backward(&model, &one, &options, Recompute::None);
        loss += one.language.sum;
        for (name, values) in grads {
            let sum = sums.entry(name).or_insert_with(|| vec![0.0; values.len()]);
            sum.iter_mut().zip(&values).for_each(|(sum, x)| *sum += x);
        }
    }
    assert!(ratio(&logits, &apart) < 1e-5);
    assert!((together.language.sum - loss).abs() < 1e-5 * loss);
    assert_eq!(grads.len(), sums.len());
    for (name, values) in &grads {
        if is_indexer(name) {
            assert!(values.iter().all(|x| *x == 0.0), "{name} has no gradient without the indexers' loss");
        } else {
            assert!(values.iter().any(|x| *x != 0.0), "{name} has a gradient");
            let off = ratio(values, &sums[name]);
            assert!(off < 1e-4, "{name}: {off:e}");
        }
    }
}

#[test]
fn the_indexers_loss_moves_every_weight_of_theirs_and_in_the_sparse_stage_nothing_else() {
    let (model, ids) = load(Precision::f32());
    let batch = Batch::rows(ids, 29).unwrap();
    let (plain, without) = backward(&model, &batch, &LossOptions::default(), Recompute::None);
    assert_eq!(plain.indexer, 0.0);
    for stage in STAGES {
        let (loss, grads) = backward(&model, &batch, &with_indexer(stage), Recompute::None);
        println!("{stage:?}: {loss:?}");
        assert!(loss.indexer > 1e-3 && loss.indexer.is_finite());
        let mut indexers = 0;
        for (name, values) in &grads {
            if is_indexer(name) {
                assert!(values.iter().any(|x| *x != 0.0), "{stage:?}: {name} has a gradient");
                indexers += 1;
            } else if stage == IndexerStage::Sparse {
                assert_eq!(values, &without[name], "{name}");
            } else {
                assert!(values.iter().all(|x| *x == 0.0), "{name} has no gradient in the warm-up");
            }
        }
        assert_eq!(indexers, 3 * 5);
        if stage == IndexerStage::Sparse {
            assert_eq!(loss.language, plain.language);
        }
    }
}

#[test]
fn a_model_without_an_indexer_says_so() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/gemma2");
    let model = Model::load(&folder, |_| Ok(Precision::f32())).unwrap();
    let batch = Batch::packed(vec![1, 2, 3], vec![0, 3]).unwrap();
    let options = with_indexer(IndexerStage::Sparse);
    let error =
        model.forward_backward(&mut model.grads(), &batch, &options, Recompute::None, None).unwrap_err();
    assert!(error.to_string().contains("no indexer"), "{error}");
}

#[test]
fn whatever_is_recomputed_the_bits_are_the_same() {
    for precision in [Precision::f32(), Precision::bf16()] {
        let (model, ids) = load(precision);
        let batch = Batch::packed(ids, vec![0, 29, 34, 58]).unwrap();
        for options in [LossOptions::default(), with_indexer(STAGES[0]), with_indexer(STAGES[1])] {
            let (loss, grads) = backward(&model, &batch, &options, Recompute::None);
            for recompute in [Recompute::Selective, Recompute::Full] {
                let (again, grads_again) = backward(&model, &batch, &options, recompute);
                assert_eq!(loss, again, "{recompute:?}");
                assert!(bits(&grads) == bits(&grads_again), "{recompute:?}");
            }
        }
    }
}

#[test]
fn a_probe_sees_the_attention_and_its_indexer() {
    let (model, ids) = load(Precision::f32());
    let sites = |tokens: usize| -> BTreeMap<String, usize> {
        let batch = Batch::packed(ids[..tokens].to_vec(), vec![0, tokens]).unwrap();
        let mut recorder = Recorder { pattern: Some("layers.1.self_attn.*".into()), ..Recorder::default() };
        model.logits(&batch, Some(&mut recorder)).unwrap();
        recorder
            .seen
            .into_iter()
            .map(|seen| (seen.site.replace("layers.1.self_attn.", ""), seen.values.len()))
            .collect()
    };
    // A probe sees the indexer even if the sequence is too short for a selection (5 tokens).
    for tokens in [5, 29] {
        let expected = [
            ("indexer.k", tokens * 16),
            ("indexer.q", tokens * 4 * 16),
            ("indexer.scores", tokens * tokens),
            ("indexer.w", tokens * 4),
            ("k", tokens * 4 * 24),
            ("logits", 4 * tokens * tokens),
            ("o", tokens * 4 * 16),
            ("q", tokens * 4 * 24),
            ("v", tokens * 4 * 16),
        ];
        assert_eq!(sites(tokens), expected.map(|(site, len)| (site.to_string(), len)).into());
    }
}

#[test]
fn bf16_is_near_f32() {
    let (model, ids) = load(Precision::f32());
    let batch = Batch::rows(ids, 29).unwrap();
    let wide = model.logits(&batch, None).unwrap();
    let (loss, _) = backward(&model, &batch, &with_indexer(IndexerStage::Sparse), Recompute::None);
    let (model, _) = load(Precision::bf16());
    let narrow = model.logits(&batch, None).unwrap();
    let (narrow_loss, grads) = backward(&model, &batch, &with_indexer(IndexerStage::Sparse), Recompute::None);
    assert!(grads.values().flatten().all(|x| x.is_finite()));
    // Rounding can change the selected keys or experts of a token and so all its logits: check the median,
    // not the maximum.
    let vocabulary = model.config.vocabulary;
    let rows = narrow.chunks(vocabulary).zip(wide.chunks(vocabulary));
    let mut off: Vec<f64> = rows.map(|(narrow, wide)| ratio(narrow, wide)).collect();
    off.sort_by(f64::total_cmp);
    println!("logits {:.4} {:.4} {:.4}", off[0], off[off.len() / 2], off[off.len() - 1]);
    assert!(off[off.len() / 2] < 0.05 && off[off.len() - 1].is_finite(), "{off:?}");
    let mean = |loss: &StepLoss| loss.language.sum / loss.language.tokens as f64;
    assert!((mean(&narrow_loss) - mean(&loss)).abs() < 0.02 * mean(&loss));
    assert!((narrow_loss.indexer - loss.indexer).abs() < 0.1 * loss.indexer);
}
