//! `phalanx import-config`: another program's configuration as one of ours.

use anyhow::{Result, anyhow};
use serde_json::json;

use crate::arguments::args::ImportConfigArgs;
use crate::arguments::overrides::Overrides;
use crate::configuration::translation::{FORMATS, Outcome, Translation, format_of};
use crate::configuration::user_config::UserConfig;
use crate::host::output;

/// Translates a file and prints TOML and table.
///
/// # Errors
/// A file that cannot be translated; nothing is printed then but what is wrong with it.
pub fn import_config(args: &ImportConfigArgs) -> Result<()> {
    let overrides = Overrides { nproc: args.nproc, ..Overrides::default() };
    let given = UserConfig::default().with(&overrides, &[])?;
    let format = match args.from {
        Some(from) => FORMATS[from as usize],
        None => format_of(&args.file)?,
    };
    let mut translation = Translation::read(format, &args.file, given.clone(), true)?;
    if !args.partial {
        translation
            .refuse()
            .map_err(|error| anyhow!("{error}\n--partial translates the rest, and lists this as comments"))?;
    }
    let config = translation.onto(given, "", |_| false)?;
    let refused = translation.rows.iter().filter(|row| row.outcome == Outcome::Refused);
    let refused: String =
        refused.map(|row| format!("# left out: {} = {}: {}\n", row.name, row.value, row.why)).collect();
    let toml = refused + config.text();
    if args.json {
        let mut figures = translation.to_json();
        figures["toml"] = json!(toml);
        return output::print_json(&figures);
    }
    output::print(&toml)?;
    output::note(&translation.to_text());
    if let Err(error) = config.config()?.check() {
        output::note(&format!("with our defaults for what is left out, a run would be refused: {error}"));
    }
    Ok(())
}
