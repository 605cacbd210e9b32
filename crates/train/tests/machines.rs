//! Ranks and their machines: folders that are not shared, and memory that is.

use ballast_cluster::threads;
use ballast_model::memory;
use ballast_train::plan::MemoryPlan;
use ballast_train::{Error, TrainConfig, Trainer, setup};

use crate::common::{Listener, config};

const STEP: [&str; 4] = ["batch.groups=4", "batch.accumulation=4", "batch.sequences=1", "steps=2"];

#[test]
fn a_run_that_one_rank_resumes_in_another_folder_is_refused_on_all_before_it_is_built() {
    let folder = tempfile::tempdir().unwrap();
    let outs = ["first", "second", "absent"].map(|name| folder.path().join(name));
    for out in &outs[..2] {
        Trainer::new(config(out, &STEP)).unwrap().run(&Listener::default()).unwrap();
    }
    for other in &outs[1..] {
        let errors = threads::run(2, |world| {
            let out = if world.rank() == 0 { &outs[0] } else { other };
            Trainer::resume_on(out, &[], world).err().unwrap()
        });
        for error in errors {
            let place = format!("cannot write to {}", other.join("checkpoints").display());
            let text = error.to_string();
            assert!(matches!(error, Error::Config { .. }), "{text}");
            assert!(text.contains("rank 1 on ") && text.contains(&place), "{text}");
        }
    }
    threads::run(2, |world| Trainer::resume_on(&outs[0], &["steps=3".into()], world).map(drop).unwrap());
}

/// A run of which one rank fits in the memory of this machine, and four do not; and what one needs.
fn large(out: &std::path::Path, free: u64) -> (TrainConfig, u64) {
    let mut config = config(out, &STEP);
    let model = setup::outline(&config).unwrap();
    let precision = setup::precision(&config, &model.config).unwrap();
    loop {
        let needed = MemoryPlan::for_rank(&config, &model, &precision, 0, 4).unwrap().total();
        if needed > free * 3 / 10 {
            return (config, needed);
        }
        config.batch.sequences *= 2;
    }
}

#[test]
fn ranks_of_one_machine_that_do_not_fit_together_are_refused_with_their_number() {
    let Some(free) = memory::available() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (config, needed) = large(&folder.path().join("run"), free);
    assert!(needed < free, "each of them fits alone: {needed} bytes of {free}");
    let errors = threads::run(4, |world| Trainer::new_on(config.clone(), world).err().unwrap());
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, Error::Model(ballast_model::Error::Memory { .. })), "{text}");
        assert!(text.contains("4 ranks on ") && text.contains(" each"), "{text}");
    }
}
