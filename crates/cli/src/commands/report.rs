//! `ballast report`

use std::fs;
use std::path::PathBuf;

use ballast_files::encoding::text_without_mark;
use ballast_files::regular::read_regular_text;
use ballast_files::{Error, look_at};
use ballast_train::ledger::Ledger;
use ballast_train::metrics;
use ballast_train::report::{Report, html, ledger_rows};
use clap::Args;
use serde_json::json;

use super::Global;
use crate::exit::{Outcome, Usage};
use crate::output::{self, clean};

/// Draw report.html from the metrics of a run, of `ballast train` or of `ballast.torch.Ledger` in Python.
#[derive(Args)]
pub(crate) struct ReportArgs {
    /// Folder with metrics.jsonl and, if there is one, ledger.json.
    folder: PathBuf,
    /// The page [default: report.html in the folder].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace an existing page (a page written by `ballast train` also has samples, memory plan and configuration,
    /// which are lost).
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(args: ReportArgs, global: &Global) -> anyhow::Result<Outcome> {
    let out = args.out.unwrap_or_else(|| args.folder.join("report.html"));
    if out.exists() && !args.force {
        let problem = format!("{}: exists; use --force to replace it, or --out", out.display());
        return Err(Usage(problem).into());
    }
    let records = metrics::read(&args.folder.join("metrics.jsonl"))?;
    let path = args.folder.join("ledger.json");
    let ledger = if look_at(&path)?.is_some() {
        let text = read_regular_text(&path).map_err(Error::io(&path, "read"))?;
        let ledger: Ledger = serde_json::from_str(text_without_mark(&text))
            .map_err(|e| Error::Config { file: path, problem: e.to_string() })?;
        ledger_rows(&ledger)
    } else {
        Vec::new()
    };
    let (entries, tensors) = (records.len(), ledger.len());
    let title = args.folder.display().to_string();
    let page = html(&Report { title: &title, records: &records, ledger, ..Report::default() });
    // Beside the page first, so that a full disk leaves an older one whole.
    let mut part = out.clone().into_os_string();
    part.push(".part");
    let written = fs::write(&part, page).and_then(|()| fs::rename(&part, &out));
    if let Err(error) = written {
        let _ = fs::remove_file(&part);
        return Err(Error::io(&out, "write")(error).into());
    }
    let shown = out.display().to_string();
    if global.json {
        global.print_json("report", &json!({ "report": shown, "entries": entries, "protected": tensors }));
    } else {
        output::print(&format!("report  {}\n", clean(&shown)));
    }
    Ok(Outcome::Ok)
}
