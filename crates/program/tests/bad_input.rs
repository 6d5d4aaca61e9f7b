//! Every mistake is one clear message that names the key, file or rank; the exit code is 1; nothing is
//! left behind.

use crate::rig;
use std::time::{Duration, Instant};

use crate::rig::Home;

#[test]
fn impossible_values_name_their_key() {
    let home = Home::new();
    for (set, words) in [
        (vec!["model.heads=5"], vec!["model.heads = 5", "model.hidden = 32", "4"]),
        (vec!["model.hads=2"], vec!["model.hads", "did you mean heads"]),
        (vec!["model.n_inner=2"], vec!["model.n_inner", "here it is model.intermediate"]),
        (vec!["model.intermediate=0"], vec!["model.intermediate = 0", "at least 1"]),
        (vec!["model.norm_eps=0"], vec!["model.norm_eps = 0", "above 0"]),
        (
            vec!["model.intermediate=33", "parallel.tensor=2"],
            vec!["parallel.tensor = 2", "model.intermediate = 33", "numbers of ranks that can: 1"],
        ),
        (vec!["batch.global=7", "parallel.data=2"], vec!["batch.global = 7", "multiple of 2"]),
        (vec!["parallel.zero=4"], vec!["parallel.zero", "0, 1, 2 "]),
        (vec!["parallel.data=0"], vec!["parallel.data is 0", "at least 1"]),
        (vec!["model.arch=t5"], vec!["model.arch", "bert", "gpt2"]),
        (vec!["model.vocab=1000"], vec!["model.vocab = 1000", "larger", "256"]),
        (vec!["model.vocab=100"], vec!["model.vocab = 100", "smaller", "256"]),
        (vec!["model.positions=8"], vec!["model.positions = 8", "model.seq = 16"]),
        (vec!["precision.compute=f64"], vec!["precision.compute", "f32"]),
        (vec!["precision.accumulate=bf16"], vec!["precision.accumulate = bf16", "precision.compute"]),
        (vec!["precision.loss_scale=128"], vec!["precision.loss_scale = 128", "\"f16\""]),
        (vec!["precision.hysteresis=0"], vec!["precision.hysteresis = 0", "at least 1"]),
        (vec!["model.dropout=1"], vec!["model.dropout = 1", "between 0"]),
        (vec!["model.residual_dropout=-0.1"], vec!["model.residual_dropout = -0.1"]),
        (vec!["memory.checkpointing=0"], vec!["memory.checkpointing = 0", "\"selective\""]),
        (vec!["memory.checkpointing=all"], vec!["memory.checkpointing", "\"block\""]),
        (vec!["loss.label_smoothing=1.5"], vec!["loss.label_smoothing = 1.5"]),
        (vec!["loss.z_loss=-1"], vec!["loss.z_loss = -1"]),
        (vec!["optimizer.lr=-1"], vec!["optimizer.lr = -1"]),
        (vec!["data.validation=2"], vec!["data.validation = 2"]),
        (vec!["train.steps=0"], vec!["train.steps = 0"]),
        (vec!["train.steps=many"], vec!["train.steps", "\"many\"", "whole number"]),
        (vec!["train.stepz=5"], vec!["train.stepz", "train.steps"]),
        (vec!["train.lr=5"], vec!["train.lr", "optimizer.lr"]),
        (vec!["data.tokenizer=bytes"], vec!["bytes", "byte"]),
        (vec!["data.tokenizer=no/tokenizer.json"], vec!["no/tokenizer.json"]),
        (vec!["memory.chunk=huge"], vec!["memory.chunk", "\"auto\""]),
        (vec!["steps"], vec!["--set steps", "TABLE.KEY=VALUE"]),
    ] {
        let sets: Vec<&str> = set.iter().flat_map(|set| ["--set", *set]).collect();
        for command in ["plan", "train"] {
            let ended = home.run(&[&[command, "small.toml"], &sets[..]].concat());
            ended.refused(&words);
        }
        assert!(!home.path("runs/small").exists(), "{set:?}");
    }
}

/// The program may use 1 GiB of address space and 10 s of processor time here, which other programs do not take from it: it must
/// refuse what it cannot plan before it tries.
#[test]
fn sizes_beyond_any_model_are_answered_at_once() {
    let home = Home::new();
    home.write("rows.csv", (0..100_000).map(|i| format!("{i}F0,{i}B0\n")).collect::<String>());
    for (name, layers) in [("deep", 1_000_000u64), ("deeper", 1_000_000_000)] {
        std::fs::create_dir(home.path(name)).unwrap();
        let config = format!(
            r#"{{"model_type":"gpt2","n_layer":{layers},"n_embd":8,"n_head":2,"n_positions":16,"vocab_size":65}}"#
        );
        home.write(&format!("{name}/config.json"), config);
        home.write(&format!("{name}/model.safetensors"), b"\x02\0\0\0\0\0\0\0{}");
    }
    let bounds = "expected an integer from 1 to 1024";
    let micro = "batch.micro=1";
    let refused: [(&[&str], &[&str]); 13] = [
        (&["model.layers=10000"], &["model.layers = 10000: must be at most 1024"]),
        (&["model.hidden=9223372036854775807"], &["model.hidden = 9223372036854775807: must be at most"]),
        (&["model.seq=4294967296"], &["model.seq = 4294967296: must be at most"]),
        (&["batch.global=4294967296"], &["batch.global = 4294967296: must be at most"]),
        (&["batch.global=1000000", micro], &["batch.global = 1000000: makes 1000000 micro-batches", "65536"]),
        (&["batch.global=65536", micro], &["batch.global = 65536: makes a step of 65536", "batch.micro"]),
        (
            &["train.eval_samples=256", "data.validation=0.9", "model.layers=1000", micro],
            &["train.eval_samples = 256"],
        ),
        (
            &["train.threads=9223372036854775807"],
            &["train.threads = 9223372036854775807: must be at most 4096"],
        ),
        (
            &["model.arch=bert", "data.mask_token=4294967295"],
            &["data.mask_token = 4294967295: must be at most"],
        ),
        (&["run.stall_timeout_s=9223372036854775807"], &["run.stall_timeout_s", "31536000"]),
        (&["parallel.schedule=rows.csv"], &["parallel.schedule", "line 2049", "at most 2048 lines"]),
        (&["model.init=deep"], &["n_layer is 1000000", bounds]),
        (&["model.init=deeper"], &["n_layer is 1000000000", bounds]),
    ];
    let run = |args: &[&str]| rig::ended(home.shell("ulimit -v 1048576; ulimit -t 10", args, ""));
    for (set, words) in refused {
        let sets: Vec<&str> = set.iter().flat_map(|set| ["--set", *set]).collect();
        run(&[&["plan", "small.toml"], &sets[..]].concat()).refused(words);
    }
    run(&["import", "deeper"]).refused(&["n_layer is 1000000000", bounds]);
    run(&["plan", "--schedule", "rows.csv"]).refused(&["line 2049"]);
    // More than memory holds: a suggestion is found without planning thousands of micro-batches.
    let set = ["batch.global=16384", "model.seq=4096", "model.hidden=4096", "data.validation=0"];
    let sets: Vec<&str> = set.iter().flat_map(|set| ["--set", *set]).collect();
    let answer = run(&[&["plan", "small.toml"], &sets[..]].concat()).ok().stdout;
    assert!(
        answer.contains("batch.micro=") && answer.contains("would refuse it on this machine"),
        "{answer}"
    );
}

#[test]
fn a_run_cannot_go_on_with_more_ranks_than_it_starts_with() {
    let home = Home::new();
    for (start, ranks) in [
        ("train small.toml", 1),
        ("train small.toml --nproc 2", 2),
        ("launch small.toml --hosts 2 --nproc 1", 2),
    ] {
        let words = format!("{start} --run r --max-restarts 1 --min-nproc 3");
        let ended = home.run(&words.split(' ').collect::<Vec<_>>());
        ended.refused(&["--min-nproc 3", &format!("this run has {ranks} rank(s), so give {ranks} at most")]);
        assert!(!home.path("r").exists(), "{start}");
    }
}

#[test]
fn impossible_meshes_name_key_value_and_what_to_do() {
    let home = Home::new();
    home.write("deadlock.csv", "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n");
    home.write("incomplete.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n");
    home.write("other.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
    home.write("cell.csv", "0F0,0F1,0X0\n");
    let refused: [(&[&str], &[&str]); 19] = [
        (&["tensor=3"], &["parallel.tensor = 3", "model.heads = 4", "that can: 1, 2, 4"]),
        (&["tensor=8"], &["parallel.tensor = 8", "model.heads = 4", "4"]),
        (&["pipeline=6", "micro_batches=8"], &["parallel.pipeline = 6", "model.layers = 2", "fewer"]),
        (&["pipeline=4", "micro_batches=2"], &["at least 4 micro-batches", "has 2", "raise"]),
        (&["ranks=6", "pipeline=4"], &["pipeline 4", "6 ranks", "nearest", "pipeline 3", "data 2"]),
        (&["ranks=3", "data=2"], &["data 2", "there are 3", "nearest", "data 3"]),
        (&["pipeline=0"], &["parallel.pipeline is 0", "at least 1"]),
        (&["micro_batches=3"], &["batch.global = 8", "multiple of 3", "6 and 9"]),
        (&["schedule=1f1f"], &["parallel.schedule = \"1f1f\"", "1f1b", "zb-v", "no file 1f1f"]),
        (&["schedule=text.txt"], &["parallel.schedule = \"text.txt\"", "line 1, column 1"]),
        (&["schedule=cell.csv"], &["\"cell.csv\"", "line 1, column 9", "`0X0`", "F, B, I, W"]),
        (
            &["schedule=deadlock.csv", "pipeline=2"],
            &["\"deadlock.csv\"", "deadlocks", "rank 0", "`1F1` waits"],
        ),
        (&["schedule=incomplete.csv", "pipeline=2"], &["\"incomplete.csv\"", "`1B1` is missing on rank 1"]),
        (&["schedule=other.csv", "pipeline=4", "micro_batches=4"], &["parallel.schedule", "has 2 rows", "4"]),
        (&["sequence_parallel=true"], &["parallel.sequence_parallel = true", "parallel.tensor = 2 or more"]),
        (
            &["updates=asynchronous", "zero=2"],
            &["parallel.updates = \"asynchronous\"", "needs parallel.zero = 0 (it is 2)"],
        ),
        (
            &["updates=asynchronous", "tensor=2"],
            &["parallel.updates = \"asynchronous\"", "needs parallel.tensor = 1 (it is 2)"],
        ),
        (
            &["cut=uniform", "pipeline=4", "micro_batches=4"],
            &["parallel.cut", "2 blocks", "4 stages", "at most 2"],
        ),
        (&["cut=halves"], &["parallel.cut", "\"halves\"", "\"balanced\""]),
    ];
    for (set, words) in refused {
        let set: Vec<String> = set.iter().map(|set| format!("parallel.{set}")).collect();
        let sets: Vec<&str> = set.iter().flat_map(|set| ["--set", set]).collect();
        for command in [&["plan"][..], &["train"], &["bench", "step"]] {
            home.run(&[command, &["small.toml"], &sets].concat()).refused(words);
        }
        assert!(!home.path("runs/small").exists(), "{set:?}");
    }
}

#[test]
fn schedules_that_cannot_be_drawn() {
    let home = Home::new();
    home.write("deadlock.csv", "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n");
    home.write("other.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
    let refused: [(&[&str], &[&str]); 11] = [
        (&["gpipe", "--pipeline", "1000000"], &["1000000 ranks", "--pipeline"]),
        (&["1f1b", "--micro-batches", "100000"], &["100000 micro-batches", "more than can be drawn"]),
        (
            &["1f1b", "small.toml", "--micro-batches", "65536", "--set", "batch.global=65536"],
            &["more than can be drawn"],
        ),
        (&["1fb"], &["1fb", "1f1b", "zb-v", "no file"]),
        (&["deadlock.csv"], &["deadlocks", "rank 0", "rank 1"]),
        (&["."], &["cannot read", "text file"]),
        (&["1f1b", "--pipeline", "4", "--micro-batches", "2"], &["4 ranks", "at least 4 micro-batches"]),
        (&["interleaved", "--micro-batches", "9"], &["9", "nearest", "10"]),
        (&["other.csv", "--pipeline", "3"], &["--pipeline 3", "other.csv has 2 ranks"]),
        (&["gpipe", "--set", "parallel.pipeline=2"], &["--set", "configuration"]),
        (&["gpipe", "--svg", "no/a.svg"], &["no/a.svg", "cannot write"]),
    ];
    for (args, words) in refused {
        home.run(&[&["plan", "--schedule"], args].concat()).refused(words);
    }
    for args in [&["plan"][..], &["plan", "small.toml", "--svg", "a.svg"]] {
        assert_eq!(home.run(args).code, Some(2), "{args:?}");
    }
}

#[test]
fn configuration_files_that_are_none() {
    let home = Home::new();
    home.run(&["train", "smal.toml"]).refused(&["smal.toml", "no configuration file"]);
    home.write("broken.toml", "[model]\nhidden = = 3\n");
    home.run(&["train", "broken.toml"]).refused(&["broken.toml", "line 2"]);
    home.write("typo.toml", "[model]\nhiden = 32\n");
    home.run(&["train", "typo.toml"]).refused(&["typo.toml", "model.hiden", "model.hidden"]);
    home.write("table.toml", "[modell]\nhidden = 32\n");
    home.run(&["train", "table.toml"]).refused(&["modell.hidden", "model.hidden"]);
    assert_eq!(home.run(&["train"]).code, Some(2));
}

#[test]
fn data_that_cannot_be_used() {
    let home = Home::new();
    home.write("empty.txt", "");
    home.write("short.txt", "ten bytes.");
    home.write("binary.txt", [0xff, 0xfe, 0x00]);
    std::fs::create_dir(home.path("folder")).unwrap();
    for (data, words) in [
        ("missing.txt", vec!["data.text = \"", "missing.txt\": no such file"]),
        ("empty.txt", vec!["empty.txt", "no text"]),
        ("folder", vec!["folder", "no text"]),
        ("binary.txt", vec!["binary.txt", "UTF-8"]),
        ("short.txt", vec!["tokens", "sequence", "needs"]),
    ] {
        home.run(&["train", "small.toml", "--data", data]).refused(&words);
        assert!(!home.path("runs/small").exists(), "{data}");
    }
    let text = String::from_utf8(home.read("small.toml")).unwrap().replace("text = [\"text.txt\"]\n", "");
    home.write("none.toml", &text);
    home.run(&["train", "none.toml"]).refused(&["data.text", "data.tokens"]);
    for (arch, key, path) in [("gpt2", "tokens", "missing.bin"), ("bert", "rows", "missing.csv")] {
        let [arch, set] = [format!("model.arch={arch}"), format!("data.{key}={path}")];
        let (named, missing) = (format!("data.{key} = \""), format!("{path}\": no such file"));
        home.run(&["train", "none.toml", "--set", &arch, "--set", &set]).refused(&[&named, &missing]);
    }
}

#[test]
fn token_files_with_ids_that_the_model_has_not() {
    let home = Home::new();
    let ids: Vec<u16> = (0..2000).map(|i| if i == 700 { 300 } else { i % 256 }).collect();
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    home.write("ids.bin", bytes);
    let text = String::from_utf8(home.read("small.toml")).unwrap();
    home.write("ids.toml", text.replace("text = [\"text.txt\"]", "tokens = \"ids.bin\""));
    home.run(&["train", "ids.toml"]).refused(&["model.vocab", "ids.bin"]);
    let args = ["train", "ids.toml", "--set", "model.vocab=256"];
    home.run(&args).refused(&["token 700", "ids.bin", "300", "256"]);
    home.run(&["train", "ids.toml", "--set", "model.vocab=301", "--quiet"]).ok();
}

#[test]
fn folders_that_cannot_be_written() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "text.txt/run"]).refused(&["text.txt/run", "--run"]);
    home.run(&["tokenize", "--out", "text.txt/tokens.bin", "text.txt"]).refused(&["text.txt/tokens.bin"]);
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    home.run(&["export", "r", "--out", "text.txt/hf"]).refused(&["text.txt/hf"]);
    home.run(&["import", "r", "--run", "i"]).refused(&["config.json"]);
}

#[test]
fn kernels_types_and_instruction_sets_that_there_are_not() {
    let home = Home::new();
    let kernels = ["bench", "kernels", "--setting", "tiny"];
    home.run(&[&kernels[..], &["--only", "matmul"]].concat())
        .refused(&["--only matmul", "linear_gelu 32x32"]);
    let ended = home.run(&[&kernels[..], &["--dtype", "f8"]].concat());
    assert!(ended.code == Some(2) && ended.stderr.contains("f32, bf16, f16"), "{}", ended.stderr);
    for command in ["plan", "train"] {
        let ended = home.run_with(("PHALANX_ISA", "sse9"), &[command, "small.toml"]);
        ended.refused(&["PHALANX_ISA=sse9", "portable, avx2, avx512, avx512bf16"]);
    }
    assert!(!home.path("runs/small").exists());
}

#[test]
fn more_ranks_than_the_machine_holds() {
    let home = Home::new();
    let args = ["train", "small.toml", "--nproc", "2000", "--set", "batch.global=2000"];
    home.run(&args).refused(&["2000 rank"]);
    home.run(&["bench", "collectives", "--nproc", "2", "--bytes", "4"]).refused(&["--bytes 4"]);
    home.run(&["bench", "collectives", "--plaintext"]).refused(&["--plaintext", "shared memory"]);
    home.run(&["bench", "collectives", "--transport", "tcp", "--nproc", "1"]).refused(&["--nproc 1"]);
    home.run(&["bench", "collectives", "--nproc", "2", "--bytes", "99999999999999"]).refused(&["available"]);
}

/// The smallest and the largest values that the command line takes (`counts.rs`): refused by name, or worked on. Work of so many
/// steps is ended here.
#[test]
fn the_largest_numbers_are_refused_by_name_or_worked_on() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "trained", "--quiet"]).ok();
    std::fs::create_dir(home.path("disk")).unwrap();
    let (ranks, job, times, tokens, parts) = ("1048576", "1024", "1048576", "16777216", "16777216");
    let tables: [(&str, &[(&str, &str)]); 12] = [
        (
            "sample trained --prompt the",
            &[
                ("tokens", tokens),
                ("tokens", "0"),
                ("top-k", tokens),
                ("shift", tokens),
                ("seed", "18446744073709551615"),
                ("step", "18446744073709551615"),
                ("step", "0"),
                ("temperature", "1000000"),
                ("top-p", "0"),
            ],
        ),
        ("plan small.toml", &[("nproc", ranks), ("device-memory", "999999999GB"), ("device-memory", "1")]),
        (
            "plan --schedule 1f1b",
            &[
                ("pipeline", ranks),
                ("micro-batches", parts),
                ("forward", "1000000000000000"),
                ("message", "1000000000000000"),
            ],
        ),
        ("plan --schedule interleaved", &[("chunks", parts)]),
        ("plan small.toml --chunks", &[("nproc", ranks)]),
        ("train small.toml --max-restarts 1", &[("nproc", ranks), ("min-nproc", ranks)]),
        ("train small.toml --run restarts", &[("max-restarts", times)]),
        ("launch small.toml", &[("hosts", job)]),
        ("launch small.toml --hosts 2", &[("nproc", ranks)]),
        ("bench step small.toml", &[("steps", times), ("warmup", times), ("nproc", ranks)]),
        ("bench memory small.toml", &[("budgets", "10000"), ("budgets", "0")]),
        ("bench disk disk --no-fio", &[("size", "900000000000000000"), ("size", "1")]),
    ];
    for (command, options) in tables {
        for (option, value) in options {
            let set = format!("--{option}={value}");
            let args: Vec<&str> = command.split(' ').chain([set.as_str()]).collect();
            let (start, mut child) = (Instant::now(), home.start(&args));
            while child.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(2) {
                std::thread::sleep(Duration::from_millis(5));
            }
            // Where it has ended, there is nothing to kill.
            let _ = child.kill();
            let ended = rig::finish(child);
            assert!(!ended.stderr.contains("panicked"), "{args:?}: {}", ended.stderr);
            let names = ended.stderr.contains(option) || ended.stderr.contains(value);
            let is_refused = matches!(ended.code, Some(1 | 2)) && names;
            assert!(
                is_refused || matches!(ended.code, None | Some(0)),
                "{args:?}: {:?}: {}",
                ended.code,
                ended.stderr
            );
        }
    }
}
