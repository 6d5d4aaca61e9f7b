//! Texts that the binary reads, changed in thousands of ways: each is read or refused, without a panic and in
//! bounded memory.

mod extreme_values;

use phalanx_testing::hostile::{Counting, Random, mutate, overwrite, peak_bytes, survive};
use phalanx_train::RunConfig;
use phalanx_train::metrics_lines::MAX_LINE_BYTES;
use tempfile::tempdir;

use crate::arguments::limits::{CONFIG_BYTES, SCHEDULE_BYTES};
use crate::configuration::schedule_file;
use crate::configuration::translation::{FORMATS, Translation};
use crate::configuration::user_config::UserConfig;
use crate::folders::run_folder::RunFolder;
use crate::reports::final_report::Reached;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Maximum memory for reading one of the small texts here.
const MAX_BYTES: usize = 8 << 20;

const SCHEDULE: &str = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n";

const METRICS: &str = "{\"step\":1,\"loss\":4.5,\"grad_norm\":1.0,\"lr\":1e-3,\"tokens\":128,\"step_s\":0.01}\n\
    {\"step\":2,\"loss\":4.4,\"grad_norm\":1.0,\"lr\":1e-3,\"tokens\":256,\"step_s\":0.01,\"skipped\":true}\n\
    {\"step\":2,\"val_loss\":4.4}\n";

#[test]
fn configurations_of_any_content_are_read_or_refused() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("config.toml");
    let complete = toml::to_string_pretty(&RunConfig::default()).unwrap();
    let mut read = |bytes: &[u8]| {
        overwrite(&path, bytes);
        UserConfig::read(&path).and_then(|given| given.config()).is_ok()
    };
    assert!(read(complete.as_bytes()));
    let changed = |random: &mut Random| mutate(random, complete.as_bytes());
    let accepted = survive("configuration", 3000, MAX_BYTES, changed, &mut read);
    assert!((1..3000).contains(&accepted), "{accepted} accepted");
}

#[test]
fn configurations_of_other_programs_of_any_content_are_translated_or_refused() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("theirs");
    let texts = [
        "{\"train_batch_size\": 8, // all\n\"fp16\": {\"enabled\": \"auto\"}, optimizer: {type: Adam\nparams: {lr: 1e-3, betas: [0.9, 0.99],}}}",
        "import os\nbatch_size = 2 * 4\nout_dir = 'out'\nalways_save_checkpoint = False\nmin_lr = 1e-4 # least\n",
        "[training]\nsteps = 10\nlocal_batch_size = 2\n[model]\nconverters = []\n[activation_checkpoint]\nmode = \"full\"\n",
        "base_model: a\nspecial_tokens:\n  pad: \"x\"\nmicro_batch_size: 2 # each\nmax_steps: 5\nplugins:\n  - a\n",
        "stage: pt\nmax_steps: 9\nwarmup_ratio: 0.1\nbf16: true\noutput_dir: >\n  a\n  b\nreport_to: [a,\n  'b']\n",
    ];
    for (format, text) in FORMATS.into_iter().zip(texts) {
        let read = |bytes: &[u8]| {
            overwrite(&path, bytes);
            Translation::read(format, &path, UserConfig::default(), true).is_ok()
        };
        assert!(read(text.as_bytes()), "{}", format.name);
        survive(format.name, 200, MAX_BYTES, |random| mutate(random, text.as_bytes()), read);
    }
}

#[test]
fn schedules_of_any_content_are_read_or_refused() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("schedule.csv");
    let read = |bytes: &[u8]| {
        overwrite(&path, bytes);
        schedule_file::read(path.to_str().unwrap()).is_ok()
    };
    assert!(read(SCHEDULE.as_bytes()));
    survive("schedule", 5000, MAX_BYTES, |random| mutate(random, SCHEDULE.as_bytes()), read);
}

#[test]
fn metrics_of_any_content_are_read_or_refused() {
    let folder = tempdir().unwrap();
    let run = RunFolder::at(folder.path());
    assert_eq!(Reached::read(&run).unwrap(), Reached::default());
    let read = |bytes: &[u8]| {
        overwrite(&run.file("metrics.jsonl"), bytes);
        Reached::read(&run).is_ok()
    };
    assert!(read(METRICS.as_bytes()));
    let reached = Reached::read(&run).unwrap();
    assert_eq!((reached.step, reached.losses, reached.skipped), (2, Some((4.5, 4.4)), 1));
    survive("metrics", 5000, MAX_BYTES, |random| mutate(random, METRICS.as_bytes()), read);
}

/// Reads a file that is too large.
type Read<'a> = &'a dyn Fn() -> anyhow::Result<()>;

/// Reading the largest allowed files takes a bounded multiple of their size; larger files are refused.
#[test]
fn the_memory_for_large_texts_is_bounded() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("text");
    let (text, run) = (path.to_str().unwrap(), RunFolder::at(folder.path()));
    // A sparse file of one terabyte.
    std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    std::fs::File::create(run.file("metrics.jsonl")).unwrap().set_len(1 << 40).unwrap();
    let refused: [(&str, u64, Read); 3] = [
        ("at most", CONFIG_BYTES, &|| UserConfig::read(&path).map(drop)),
        ("at most", SCHEDULE_BYTES, &|| schedule_file::read(text).map(drop)),
        ("line 1 has more than", MAX_LINE_BYTES, &|| Reached::read(&run).map(drop)),
    ];
    for (words, limit, read) in refused {
        let (refused, peak) = peak_bytes(read);
        let error = format!("{:#}", refused.unwrap_err());
        assert!(error.contains(&format!("{words} {limit}")), "{error}");
        assert!(peak < 1 << 20, "{peak} bytes");
    }
    // A quarter of the maximum size, of the contents that take most memory.
    let large = |part: &str, limit: u64| part.repeat(limit as usize / 4 / part.len());
    let cases: [(&str, String, &dyn Fn()); 3] = [
        ("a list", format!("a = [{}]", large("[],", CONFIG_BYTES)), &|| drop(UserConfig::read(&path))),
        ("keys", large("[a]\n", CONFIG_BYTES), &|| drop(UserConfig::read(&path))),
        ("cells", large(",", SCHEDULE_BYTES), &|| drop(schedule_file::read(text))),
    ];
    for (name, content, read) in cases {
        std::fs::write(&path, content).unwrap();
        let ((), peak) = peak_bytes(read);
        assert!(peak < 200 << 20, "{name}: {peak} bytes");
    }
}
