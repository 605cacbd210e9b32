//! Masters beside bf16 weights, and moments in fewer bits than f32.

use ballast_train::optimizer::{Master, Place, Stored};
use ballast_train::state::weights_checksum;
use ballast_train::{Attempt, Trainer};

use crate::common::{Listener, config};

fn bits(trainer: &Trainer) -> Vec<(String, Vec<u32>)> {
    let tensors = trainer.optimizer.tensors(&trainer.model).into_iter();
    tensors.map(|(name, _, values)| (name, values.into_iter().map(f32::to_bits).collect())).collect()
}

fn steps(trainer: &mut Trainer, count: usize) -> Vec<u64> {
    let step = |_| match trainer.attempt(&mut |_| {}).unwrap() {
        Attempt::Taken(step) => step.loss.to_bits(),
        Attempt::NotTaken => panic!("no step"),
    };
    (0..count).map(step).collect()
}

#[test]
fn masters_beside_bf16_weights_have_the_bits_of_f32_masters() {
    for kind in ["adamw", "muon"] {
        let folder = tempfile::tempdir().unwrap();
        let kind = format!("optimizer.kind={kind}");
        let start = |name: &str| {
            Trainer::new(config(&folder.path().join(name), &["precision.preset=bf16", &kind])).unwrap()
        };
        let (mut beside, mut wide) = (start("beside"), start("wide"));
        for slot in wide.optimizer.slots.iter_mut().filter(|slot| slot.master.is_some()) {
            slot.master = Some(Master::F32(slot.values(&wide.model)));
        }
        let masters = beside.optimizer.slots.iter().filter_map(|slot| slot.master.as_ref());
        let elements: usize = masters.map(Master::len).sum();
        assert!(elements > 10_000 && wide.optimizer.master_bytes() == 4 * elements);
        let more = beside.optimizer.master_bytes() - 2 * elements;
        assert!(more < elements / 100 + 24 * beside.optimizer.slots.len(), "{more}");
        assert_eq!(steps(&mut beside, 6), steps(&mut wide, 6), "{kind}");
        assert!(bits(&beside) == bits(&wide), "{kind}");
        assert_eq!(weights_checksum(&beside.model), weights_checksum(&wide.model));
    }
}

#[test]
fn moments_in_fewer_bits_go_on_with_the_same_bits_on_any_number_of_threads() {
    for kind in ["adamw", "muon"] {
        for (moments, width) in [("bf16", 2.0), ("8bit", 1.0 + 4.0 / 256.0)] {
            let folder = tempfile::tempdir().unwrap();
            let (kind_set, moments_set) =
                (format!("optimizer.kind={kind}"), format!("optimizer.moments={moments}"));
            let start = |name: &str| {
                let settings = ["steps=6", &kind_set, &moments_set];
                Trainer::new(config(&folder.path().join(name), &settings)).unwrap()
            };
            let mut whole = start("whole");
            for slot in &whole.optimizer.slots {
                let is_weight = matches!(slot.place, Place::Weight(_));
                for tensor in &slot.state {
                    assert_eq!(matches!(tensor.values, Stored::F32(_)), !is_weight, "{}", slot.name);
                    let expected = if is_weight { width } else { 4.0 } * tensor.values.len() as f64;
                    assert!((tensor.values.bytes() as f64 - expected).abs() <= 4.0, "{}", slot.name);
                }
            }
            let losses = Listener::default();
            whole.run(&losses).unwrap();
            let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
            let stopped = Listener { stop_after: Some(3), ..Listener::default() };
            pool.install(|| start("moved").run(&stopped)).unwrap();
            let mut resumed = Trainer::resume(&folder.path().join("moved"), &[]).unwrap();
            let rest = Listener::default();
            resumed.run(&rest).unwrap();
            assert_eq!([stopped.losses(), rest.losses()].concat(), losses.losses(), "{kind} {moments}");
            assert!(bits(&resumed) == bits(&whole), "{kind} {moments}");
            drop(resumed);
            let refused = Trainer::resume(&folder.path().join("moved"), &["optimizer.moments=f32".into()]);
            let error = refused.map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("optimizer.moments") && error.contains("saved in that type"), "{error}");
        }
    }
}

#[test]
fn another_seed_rounds_moments_in_another_way() {
    let folder = tempfile::tempdir().unwrap();
    let start =
        |name: &str| Trainer::new(config(&folder.path().join(name), &["optimizer.moments=bf16"])).unwrap();
    let (mut first, mut second) = (start("first"), start("second"));
    second.optimizer.seed += 1;
    let losses = [&mut first, &mut second].map(|trainer| steps(trainer, 1));
    assert_eq!(losses[0], losses[1], "the same data and weights");
    assert!(bits(&first) != bits(&second));
}

#[test]
fn moments_in_fewer_bits_learn_almost_as_well() {
    let loss = |moments: &str| {
        let folder = tempfile::tempdir().unwrap();
        let moments = format!("optimizer.moments={moments}");
        let settings = ["steps=40", "optimizer.learning_rate=3e-3", &moments];
        let listener = Listener::default();
        Trainer::new(config(folder.path(), &settings)).unwrap().run(&listener).unwrap();
        let losses = listener.losses();
        losses[30..].iter().map(|bits| f64::from_bits(*bits)).sum::<f64>() / 10.0
    };
    let [wide, bf16, bits8] = ["f32", "bf16", "8bit"].map(loss);
    println!("loss {wide:.4} with f32 moments, {bf16:.4} with bf16, {bits8:.4} with 8 bits");
    assert!((bf16 - wide).abs() < 0.02 * wide && (bits8 - wide).abs() < 0.04 * wide, "{wide} {bf16} {bits8}");
}

#[test]
fn a_master_that_does_not_belong_to_its_weight_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let listener = Listener { stop_after: Some(2), ..Listener::default() };
    Trainer::new(config(&out, &["steps=4", "precision.preset=bf16"])).unwrap().run(&listener).unwrap();
    let file = out.join("checkpoints/step-00000002/optimizer.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let is_master = |(name, _): &(&String, &serde_json::Value)| name.starts_with("master.");
    let (name, entry) = json.as_object().unwrap().iter().find(is_master).unwrap();
    let begin = 8 + header + entry["data_offsets"][0].as_u64().unwrap() as usize;
    // The exponent of the first element.
    bytes[begin + 3] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let error = Trainer::resume(&out, &[]).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains(name.as_str()), "{error}");
    assert!(error.contains("at element 0, which is not the weight's"), "{error}");
    assert!(error.contains("optimizer.safetensors"), "{error}");
}
