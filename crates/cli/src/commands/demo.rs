//! `ballast demo`: the checkpoint commands on a small synthetic model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::FileFormat;
use ballast_checkpoint::audit::audit;
use ballast_checkpoint::convert::{ConvertOptions, execute, plan};
use ballast_checkpoint::diff::diff;
use ballast_checkpoint::repair::repair;
use ballast_checkpoint::synthetic::SyntheticModel;
use ballast_contract::{Dtype, Registry};
use ballast_files::jobs::Silent;
use clap::Args;
use serde_json::json;

use super::{Global, audit as audit_command, convert, diff as diff_command, repair as repair_command};
use crate::exit::Outcome;
use crate::output;

/// Break a small checkpoint with a cast to bf16, then find and repair the damage.
#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Keep the four checkpoints in this new folder.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

pub(crate) fn run(args: DemoArgs, global: &Global) -> anyhow::Result<Outcome> {
    let temporary = tempfile::tempdir()?;
    let folder = match &args.keep {
        Some(folder) => {
            std::fs::create_dir(folder)
                .map_err(|e| anyhow::anyhow!("{}: cannot create: {e}", folder.display()))?;
            folder.as_path()
        }
        None => temporary.path(),
    };
    let demo = Demo { folder, shown: args.keep.as_deref(), global };
    demo.play()
}

struct Demo<'a> {
    folder: &'a Path,
    shown: Option<&'a Path>,
    global: &'a Global,
}

impl Demo<'_> {
    fn play(&self) -> anyhow::Result<Outcome> {
        let registry = Registry::builtin();
        let (strict, none) = (registry.policy("strict")?, registry.policy("none")?);
        self.say("A small Qwen3.5-style hybrid as released: A_log, dt_bias and the GDN output norm are f32.");
        let original = self.folder.join("original");
        SyntheticModel::tiny().write(&original, u64::MAX)?;
        let original = Arc::new(Checkpoint::open_consistent(&original)?);

        self.say(
            "\n1. Cast the whole model to bf16, as many frameworks do (here: convert without a policy).",
        );
        self.command("convert original broken --dtype bf16 --policy none");
        let options = ConvertOptions { dtype: Some(Dtype::Bf16), ..ConvertOptions::new(none) };
        self.convert(&original, "broken", &options)?;

        self.say("\n2. Audit finds the damage.");
        self.command("audit broken");
        let broken = self.open("broken")?;
        let before = audit(&broken, registry, &strict, &Silent)?;
        self.print(&audit_command::text(&before));

        self.say("\n3. Convert restores the dtype, not the lost bits, and audit says so.");
        self.command("convert broken upcast");
        let options = ConvertOptions::new(broken.contract(registry, &strict)?.1);
        self.convert(&broken, "upcast", &options)?;
        self.command("audit upcast");
        let upcast = self.open("upcast")?;
        let between = audit(&upcast, registry, &strict, &Silent)?;
        self.print(&audit_command::text(&between));

        self.say("\n4. Repair restores the f32 bits from the original, and diff proves it.");
        self.command("repair upcast repaired --original original");
        let report =
            repair(&upcast, &original, Some(&self.folder.join("repaired")), &options.policy, false, &Silent)?;
        self.print(&repair_command::text(&report));
        self.command("diff repaired original");
        let repaired = self.open("repaired")?;
        let comparison = diff(&repaired, &original, &Silent)?;
        let differing: Vec<_> = comparison.tensors.iter().filter(|t| t.differs(0.0, false)).collect();
        self.print(&diff_command::text(&comparison, &differing, 8));
        let after = audit(&repaired, registry, &strict, &Silent)?;
        if let Some(folder) = self.shown {
            self.say(&format!(
                "\nThe four checkpoints are in {}.",
                output::clean(&folder.display().to_string())
            ));
        }
        if self.global.json {
            let document = json!({ "broken": before, "upcast": between, "repair": report, "repaired": after, "diff": comparison });
            self.global.print_json("demo", &document);
        }
        let as_told = !before.passed && between.passed && after.passed && differing.is_empty();
        Ok(if as_told { Outcome::Ok } else { Outcome::CheckFailed })
    }

    fn open(&self, name: &str) -> anyhow::Result<Arc<Checkpoint>> {
        Ok(Arc::new(Checkpoint::open_consistent(&self.folder.join(name))?))
    }

    fn convert(&self, source: &Arc<Checkpoint>, name: &str, options: &ConvertOptions) -> anyhow::Result<()> {
        let plan = plan(source, options)?;
        self.print(&convert::plan_text(&plan));
        let report = execute(source, plan, &self.folder.join(name), options, &Silent)?;
        self.print(&convert::report_text(&report, FileFormat::Safetensors, name));
        Ok(())
    }

    fn say(&self, text: &str) {
        self.print(&format!("{text}\n"));
    }

    fn command(&self, text: &str) {
        self.print(&format!("\n$ ballast {text}\n"));
    }

    fn print(&self, text: &str) {
        if !self.global.json {
            output::print(text);
        }
    }
}
