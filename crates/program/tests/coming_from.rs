//! Every line of docs/coming-from.md runs, with a small model and in the order of the page.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::rig::{self, Home};
use phalanx_testing::process;

const PAGE: &str = include_str!("../../../docs/coming-from.md");

/// The tests that run the library's examples.
const EXAMPLES: &str = include_str!("../../phalanx/tests/examples.rs");

/// The configuration that the page calls a reader's own.
const MY: &str = "[model]\nlayers = 2\nhidden = 32\nheads = 4\nseq = 16\n[data]\ntext = [\"text.txt\"]\n\
                  [schedule]\nkind = \"constant\"\n[train]\nsteps = 2\nthreads = 1\neval_samples = 8\n";

/// The files that the page names.
const FILES: &[(&str, &str)] = &[
    ("my.toml", MY),
    (
        "ds_config.json",
        "{\"train_batch_size\": 8, \"optimizer\": {\"type\": \"Adam\", \"params\": {\"lr\": 1e-3}}, \
         \"zero_optimization\": {\"stage\": 3}}",
    ),
    ("hosts.txt", "127.0.0.1 slots=1\nlocalhost slots=2\n"),
    ("config/train_gpt2.py", "batch_size = 12\nblock_size = 1024\ngradient_accumulation_steps = 5 * 8\n"),
    (
        "llama3_8b.toml",
        "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nlocal_batch_size = 1\nsteps = 9\n",
    ),
    (
        "full.yaml",
        "base_model: models/llama\nmicro_batch_size: 1\ngradient_accumulation_steps: 8\nmax_steps: 9\n",
    ),
];

/// Launchers of others: programs that start what follows with their variables, and an ssh that stays here.
const LAUNCHERS: &[(&str, &str)] = &[
    (
        "torchrun",
        "ranks=$3; shift 4; export WORLD_SIZE=$ranks LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=1\n\
         for rank in $(seq 0 $((ranks - 1))); do RANK=$rank LOCAL_RANK=$rank \"$@\" & all=\"$all $!\"; done\n\
         for one in $all; do wait $one || exit 1; done\n",
    ),
    (
        "mpirun",
        "ranks=$2; shift 2; export OMPI_COMM_WORLD_SIZE=$ranks OMPI_COMM_WORLD_LOCAL_SIZE=$ranks PMIX_NAMESPACE=coming$$\n\
         for rank in $(seq 0 $((ranks - 1))); do\n\
         OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank \"$@\" & all=\"$all $!\"; done\n\
         for one in $all; do wait $one || exit 1; done\n",
    ),
    ("ssh", "while [ \"$1\" != -- ]; do shift; done\nshift 2\nexec sh -c \"$*\"\n"),
];

/// A folder with all of them.
fn home() -> Home {
    let home = Home::new();
    for folder in ["nvme", "config", "bin"] {
        std::fs::create_dir(home.path(folder)).unwrap();
    }
    FILES.iter().for_each(|(name, text)| home.write(name, text));
    for (name, text) in LAUNCHERS {
        let name = format!("bin/{name}");
        home.write(&name, format!("#!/bin/sh\n{text}"));
        std::fs::set_permissions(home.path(&name), PermissionsExt::from_mode(0o755)).unwrap();
    }
    home
}

/// Our lines of a chapter: the second cells of its tables, and its lines for a shell.
fn lines(chapter: &str) -> Vec<&'static str> {
    let begin = PAGE.find(&format!("\n## {chapter}\n")).unwrap_or_else(|| panic!("no chapter {chapter}")) + 1;
    let text = &PAGE[begin..];
    let text = &text[..text[1..].find("\n## ").map_or(text.len(), |end| end + 1)];
    let of_table = |line: &'static str| {
        let cell = line.strip_prefix("| ")?.split(" | ").nth(1)?;
        Some(
            cell.strip_prefix('`')?
                .strip_suffix('`')
                .unwrap_or_else(|| panic!("several pieces of code: {cell}")),
        )
    };
    let commands = ["phalanx ", "torchrun ", "mpirun ", "cargo "];
    let is_command = |line: &&str| commands.iter().any(|command| line.starts_with(command));
    text.lines().filter_map(|line| of_table(line).or(Some(line))).filter(is_command).collect()
}

/// Runs our lines of a chapter one after the other; those that start a run find none. Returns how many there are.
#[track_caller]
fn run(chapter: &str) -> usize {
    let home = home();
    let program = Path::new(env!("CARGO_BIN_EXE_phalanx"));
    assert_eq!(program.file_name().unwrap(), "phalanx");
    let folders = [home.path("bin"), program.parent().unwrap().to_path_buf()];
    let path =
        format!("{}:{}:{}", folders[0].display(), folders[1].display(), std::env::var("PATH").unwrap());
    let lines = lines(chapter);
    for line in &lines {
        if let Some(example) = line.strip_prefix("cargo run --release -p phalanx --example ") {
            assert!(EXAMPLES.contains(&format!("examples/{example}.rs")), "no test runs {example}");
            continue;
        }
        let is_new = ["train ", "launch "].iter().any(|word| line.contains(&format!("phalanx {word}")));
        if is_new && !line.contains("--resume") {
            let _ = std::fs::remove_dir_all(home.path("runs"));
        }
        let mut command = process::command("sh");
        command
            .args(["-c", line])
            .current_dir(home.path(""))
            .env("PATH", &path)
            .env("CUDA_VISIBLE_DEVICES", "");
        let ended = rig::ended(command);
        assert_eq!(ended.code, Some(0), "{line}\nstdout: {}\nstderr: {}", ended.stdout, ended.stderr);
        if is_new {
            let steps = if line.contains("--resume") { 4 } else { 2 };
            assert_eq!(home.losses("runs/my").len(), steps, "{line}: {}", ended.stderr);
        }
    }
    lines.len()
}

#[test]
fn lines_for_those_who_come_from_pytorch() {
    assert!(run("PyTorch") >= 25);
}

#[test]
fn lines_for_those_who_come_from_deepspeed() {
    assert!(run("DeepSpeed") >= 15);
}

#[test]
fn lines_for_those_who_come_from_colossal_ai() {
    assert!(run("Colossal-AI") >= 15);
}

#[test]
fn lines_for_those_who_come_from_megatron() {
    assert!(run("Megatron-LM") >= 15);
}

#[test]
fn lines_that_translate_configurations() {
    assert!(run("Configurations") >= 6);
}
