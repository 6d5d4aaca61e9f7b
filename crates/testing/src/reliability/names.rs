//! The names that a run writes in its folder, as a user sees them. A test of the program compares them with its own.

/// The files that set a run up.
pub const SETUP_FILES: [&str; 6] =
    ["config.toml", "given.toml", "plan.json", "tokens.bin", "tokenizer.json", "checksums.json"];

/// All names, those of [`SETUP_FILES`] first; those of folders with a file in them.
pub const RUN_NAMES: [&str; 17] = {
    let [config, given, plan, tokens, tokenizer, checksums] = SETUP_FILES;
    [
        config,
        given,
        plan,
        tokens,
        tokenizer,
        checksums,
        "metrics.jsonl",
        "memory.json",
        "checkpoints/mine",
        "logs/rank-1.log",
        "flight/rank-0.json",
        "references.bin",
        "metrics.csv",
        "tensorboard/mine",
        ".next/server.js",
        ".ready/config.toml",
        ".lock",
    ]
};
