//! Files of users: what a run has not written is never replaced or removed, whichever command meets it.

use crate::rig;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::rig::{Home, signal, wait};
use phalanx_testing::reliability::{RUN_NAMES, SETUP_FILES};
use rustix::process::Signal;

/// Everything below a folder, links not followed: what it is, its permissions, and its content.
fn everything(root: &Path) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let metadata = path.symlink_metadata().unwrap();
            let content = if metadata.is_dir() {
                folders.push(path.clone());
                Vec::new()
            } else if metadata.is_symlink() {
                fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
            } else {
                fs::read(&path).unwrap()
            };
            // The lock of a run names its last holder.
            if !content.starts_with(b"lock of a Phalanx run") {
                found.insert(path, (metadata.mode(), content));
            }
        }
    }
    found
}

const START: [&str; 4] = ["train", "small.toml", "--run", "d"];

fn exported(home: &Home) {
    home.run(&["train", "small.toml", "--run", "r", "--quiet", "--set", "train.steps=1"]).ok();
    home.run(&["export", "r", "--out", "hf"]).ok();
}

#[test]
fn a_file_of_the_user_under_a_name_of_a_run_is_refused_by_its_name_and_stays() {
    let home = Home::new();
    exported(&home);
    home.run(&["tokenize", "text.txt", "--out", "t.bin"]).ok();
    let tokens =
        ["train", "small.toml", "--run", "d", "--set", "data.text=[]", "--set", "data.tokens=d/tokens.bin"];
    for name in RUN_NAMES {
        let path = home.path("d").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let content = if name == "tokens.bin" { home.read("t.bin") } else { b"# mine\n".to_vec() };
        fs::write(&path, content).unwrap();
        let before = everything(&home.path(""));
        for args in [
            &START[..],
            &["train", "small.toml", "--run", "d", "--nproc", "2", "--quiet"],
            &["train", "small.toml", "--run", "d", "--resume"],
            &["train", "--run", "d", "--resume"],
            &["launch", "--hosts", "2", "--nproc", "1", "small.toml", "--run", "d", "--quiet"],
            &["import", "hf", "--run", "d"],
            &tokens,
        ] {
            let ended = home.run(args);
            let file = format!("d/{}", name.split('/').next().unwrap());
            let words = match args {
                // Without a configuration, nothing would start.
                ["train", "--run", ..] if !["config.toml", "checksums.json", ".lock"].contains(&name) => "d",
                _ => &file,
            };
            ended.refused(&[words]);
            assert!(everything(&home.path("")) == before, "{args:?} changed something beside {name}");
        }
        fs::remove_dir_all(home.path("d")).unwrap();
    }
}

#[test]
fn the_folder_of_a_configuration_is_no_run_folder() {
    let home = Home::new();
    let text = format!("# My comments.\n{}", String::from_utf8(home.read("small.toml")).unwrap());
    fs::create_dir(home.path("project")).unwrap();
    home.write("project/config.toml", text.replace("text.txt", "../text.txt"));
    let before = everything(&home.path("project"));
    let here = |args: &[&str]| {
        let mut command = home.command(args);
        command.current_dir(home.path("project"));
        rig::ended(command)
    };
    for args in
        [&["train", "config.toml", "--run", "."][..], &["train", "config.toml", "--run", ".", "--resume"]]
    {
        here(args).refused(&["./config.toml", "no run has written", "move away"]);
        assert!(everything(&home.path("project")) == before);
    }
    // Under another name it may lie in the run folder, and stays as it is.
    fs::rename(home.path("project/config.toml"), home.path("project/my.toml")).unwrap();
    here(&["train", "my.toml", "--run", ".", "--quiet"]).ok();
    assert_eq!(home.read("project/my.toml"), before[&home.path("project/config.toml")].1);
}

#[test]
fn links_in_the_place_of_a_runs_files_are_refused_and_what_they_lead_to_stays() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    fs::create_dir(home.path("elsewhere")).unwrap();
    home.write("elsewhere/rank-0.json", "mine");
    let resume = ["train", "--run", "r", "--resume", "--set", "train.steps=9", "--quiet"];
    for name in ["flight", "logs", ".next", ".ready", ".lock", "plan.json"] {
        let path = home.path("r").join(name);
        let _ = fs::remove_file(&path);
        let _ = fs::remove_dir_all(&path);
        symlink(home.path("elsewhere"), &path).unwrap();
        let before = everything(&home.path("elsewhere"));
        home.run(&resume).refused(&[&format!("r/{name}")]);
        assert!(everything(&home.path("elsewhere")) == before, "{name}");
        assert!(path.is_symlink());
        fs::remove_file(&path).unwrap();
    }
    // A folder of checkpoints may lie on another disk, and so may a checkpoint.
    fs::rename(home.path("r/checkpoints"), home.path("disk")).unwrap();
    symlink(home.path("disk"), home.path("r/checkpoints")).unwrap();
    fs::rename(home.path("disk/step-4"), home.path("elsewhere/step-4")).unwrap();
    symlink(home.path("elsewhere/step-4"), home.path("disk/step-4")).unwrap();
    let before = everything(&home.path("elsewhere"));
    home.run(&[&resume[..], &["--set", "train.keep=1", "--set", "train.save_every=1"]].concat()).ok();
    assert!(everything(&home.path("elsewhere")) == before);
    assert!(home.path("r/checkpoints").is_symlink() && home.path("disk/step-4").is_symlink());
    assert_eq!(home.newest("r"), 9);
}

#[test]
fn files_that_a_user_has_added_to_a_run_stay() {
    let home = Home::new();
    let train =
        ["train", "small.toml", "--run", "r", "--nproc", "2", "--quiet", "--set", "train.save_every=1"];
    home.run(&[&train[..], &["--set", "train.keep=\"all\""]].concat()).ok();
    let added = [
        "notes.txt",
        "checkpoints/notes.txt",
        "checkpoints/step-3/notes.txt",
        "checkpoints/step-5.tmp/notes.txt",
        "checkpoints/step-8/notes.txt",
        "logs/notes.txt",
        "flight/rank-0.json.bak",
        "mine/config.toml",
    ];
    for name in added {
        let path = home.path("r").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, name).unwrap();
    }
    home.write("r/checkpoints/step-5.tmp/rank-00000.safetensors", "half");
    let resume = ["train", "--run", "r", "--resume", "--set", "train.keep=1", "--set", "train.steps=10"];
    let ended = home.run(&resume).ok();
    for name in added {
        assert_eq!(home.read(&format!("r/{name}")), name.as_bytes(), "{name}");
    }
    assert!(!home.path("r/checkpoints/step-5.tmp/rank-00000.safetensors").exists());
    // Checkpoints with something of the user stay whole, and that is said.
    let mut left = home.checkpoints("r");
    left.sort();
    assert_eq!(left, [3, 8, 10]);
    let said = "r/checkpoints/step-3/notes.txt, r/checkpoints/step-8/notes.txt";
    assert!(ended.stdout.contains(said), "{}", ended.stdout);
    home.run(&["export", "r", "--step", "3", "--out", "hf"]).ok();
}

/// A start that was killed leaves a folder that the next one may use.
#[test]
fn an_interrupted_start_or_import_is_taken_over_and_that_is_said() {
    let home = Home::new();
    exported(&home);
    let said = "d holds a start that has made no step: this one takes its place";
    let unmade = |command: &[&str]| {
        home.run(command).ok();
        for name in ["checkpoints", "logs", "flight"] {
            let _ = fs::remove_dir_all(home.path("d").join(name));
        }
        let _ = fs::remove_file(home.path("d/metrics.jsonl"));
    };
    let import = ["import", "hf", "--run", "d"];
    let start = [&START[..], &["--quiet"]].concat();
    for (first, then) in [(&start[..], &start[..]), (&start, &import), (&import, &import), (&import, &start)]
    {
        unmade(first);
        // What an import has saved when it is killed.
        fs::create_dir_all(home.path("d/checkpoints/step-0.tmp")).unwrap();
        home.write("d/checkpoints/step-0.tmp/rank-00000.safetensors", "half");
        let ended = home.run(then).ok();
        assert!(ended.stderr.contains(said), "{first:?} {then:?}: {}", ended.stderr);
        assert!(home.newest("d") > 0 || home.path("d/checkpoints/step-0/manifest.json").exists());
        fs::remove_dir_all(home.path("d")).unwrap();
    }
    // The files of such a start that were changed, or were put there since, are somebody's own.
    for name in SETUP_FILES.into_iter().filter(|name| *name != "checksums.json") {
        unmade(&start);
        home.write(&format!("d/{name}"), "mine");
        let before = everything(&home.path("d"));
        for then in [&start[..], &import] {
            home.run(then).refused(&[&format!("d/{name}"), "checksums.json"]);
            assert!(everything(&home.path("d")) == before);
        }
        fs::remove_dir_all(home.path("d")).unwrap();
    }
    // The data of the next start is not removed with the files of the one before it.
    unmade(&start);
    let tokens = ["--set", "data.text=[]", "--set", "data.tokens=d/tokens.bin"];
    let before = everything(&home.path("d"));
    home.run(&[&start[..], &tokens].concat()).refused(&["d/tokens.bin", "copy it elsewhere"]);
    let evaluated = ["--set=data.text=[]", "--set=data.tokens=e.bin", "--set=data.validation=0"];
    let evaluated = [&start[..], &evaluated, &["--set=data.validation_tokens=d/tokens.bin"]].concat();
    home.write("e.bin", {
        let mut other = home.read("d/tokens.bin");
        other[70] ^= 1;
        other
    });
    home.run(&evaluated).refused(&["d/tokens.bin", "copy it elsewhere"]);
    assert!(everything(&home.path("d")) == before);
}

/// A refused start leaves nothing of its own, and everything that others have put into its folder meanwhile.
#[test]
fn a_refused_start_removes_only_what_it_has_made() {
    let home = Home::new();
    let before = everything(&home.path(""));
    let refused = |run: &str| {
        home.run(&["train", "small.toml", "--run", run, "--set", "memory.limit_mb=0.1"])
            .refused(&["memory.limit_mb"]);
    };
    refused("a/b/c");
    assert!(everything(&home.path("")) == before);
    fs::create_dir_all(home.path("a/b")).unwrap();
    refused("a/b/c");
    assert!(home.path("a/b").is_dir() && !home.path("a/b/c").exists());
    fs::remove_dir_all(home.path("a")).unwrap();
    // So long that the start is seen while it prepares.
    home.write("long.txt", home.read("text.txt").repeat(2000));
    let more = ["--data", "long.txt", "--set", "data.tokenizer=char", "--set", "memory.limit_mb=0.1"];
    for name in ["a/b/notes.txt", "a/b/c/notes.txt", "a/b/c/tokens.bin", "a/b/c/.next/notes.txt"] {
        let child = home.start(&[&["train", "small.toml", "--run", "a/b/c"][..], &more].concat());
        wait("the start to prepare", || home.path("a/b/c/.next/phalanx-start").exists());
        home.write(name, "precious");
        let ended = rig::finish(child);
        ended.refused(&["memory.limit_mb"]);
        assert_eq!(home.read(name), b"precious");
        let left = everything(&home.path("a")).into_keys().filter(|path| path.is_file());
        assert_eq!(left.collect::<Vec<_>>(), [home.path(name)]);
        fs::remove_dir_all(home.path("a")).unwrap();
    }
}

/// Files that commands write where the user says take the place of their own earlier output alone.
#[test]
fn output_does_not_take_the_place_of_other_files() {
    let home = Home::new();
    exported(&home);
    home.run(&["tokenize", "text.txt", "--out", "t.bin"]).ok();
    home.write("mine", "mine\n");
    let before = everything(&home.path(""));
    let inside = [
        "r",
        "r/checkpoints",
        "r/checkpoints/step-1",
        "r/checkpoints/step-1/hf",
        "r/logs",
        "r/checkpoints/new",
    ];
    for out in inside {
        for force in [&[][..], &["--force"]] {
            home.run(&[&["export", "r", "--out", out], force].concat()).refused(&[out]);
        }
        home.run(&["bench", "memory", "small.toml", "--steps", "1", "--out", out]).refused(&[out]);
        if out != "r" {
            home.run(&["man", out]).refused(&[out]);
        }
    }
    let files = [
        "r/config.toml",
        "r/tokens.bin",
        "r/checkpoints/step-1/manifest.json",
        "mine",
        "text.txt",
        "small.toml",
    ];
    for file in files {
        home.run(&["tokenize", "--force", "text.txt", "--out", file]).refused(&[file]);
        home.run(&["tokenize", "--force", "text.txt", "--tokenizer", "hf", "--out", "hf/tokenizer.json"])
            .refused(&["hf/tokenizer.json"]);
        for option in ["--svg", "--text"] {
            home.run(&["plan", "small.toml", "--schedule", option, file]).refused(&[option, file]);
        }
        home.run(&["bench", "strategies", "small.toml", "--svg", file]).refused(&["--svg", file]);
    }
    assert!(everything(&home.path("")) == before);
    fs::create_dir(home.path("out")).unwrap();
    for file in ["table.md", "memory.json", "budgets.svg"] {
        home.write(&format!("out/{file}"), "mine\n");
        home.run(&["bench", "memory", "small.toml", "--steps", "1", "--out", "out"]).refused(&[file]);
        assert_eq!(home.read(&format!("out/{file}")), b"mine\n");
        fs::remove_file(home.path("out").join(file)).unwrap();
    }
    home.write("out/phalanx.1", ".TH mine 1\n");
    home.run(&["man", "out"]).refused(&["phalanx.1"]);
    fs::remove_file(home.path("out/phalanx.1")).unwrap();
    // What the same command has written before is replaced.
    for _ in 0..2 {
        home.run(&["plan", "small.toml", "--schedule", "--svg", "a.svg", "--text", "a.txt"]).ok();
        home.run(&["tokenize", "--force", "text.txt", "--out", "t.bin"]).ok();
        home.run(&["man", "out"]).ok();
    }
}

/// Only its user may open the lock, and whoever holds it is looked for where it is.
#[test]
fn the_lock_of_a_run_tells_its_holder_and_whether_it_is_here() {
    let home = Home::new();
    let child = home.start(&[&START[..], &["--set", "train.steps=1000000", "--quiet"]].concat());
    home.wait_for_step("d", 2);
    let lock = home.path("d/.lock");
    assert_eq!(fs::metadata(&lock).unwrap().permissions().mode() & 0o777, 0o600);
    let text = String::from_utf8(home.read("d/.lock")).unwrap();
    let resume = ["train", "--run", "d", "--resume"];
    let here = format!("in use by process {} ", child.id()).trim_end().to_string();
    home.run(&resume).refused(&[&here, &format!("kill {}", child.id())]);
    let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().to_string();
    for (name, other, words) in [
        ("boot ", "boot 0\nhost node7", format!("in use by process {} on node7", child.id())),
        ("namespace ", "namespace pid:[1]", format!("number {} in another container", child.id())),
        ("started ", "started 1", "which itself has ended".to_string()),
        ("process ", "process x", "in use by another process".to_string()),
    ] {
        let without_host =
            if name == "boot " { text.replace(&format!("{}\n", line("host ")), "") } else { text.clone() };
        fs::write(&lock, without_host.replace(&line(name), other)).unwrap();
        let ended = home.run(&resume).refused(&[&words]);
        assert!(!ended.stderr.contains("kill"), "{}", ended.stderr);
    }
    fs::write(&lock, text).unwrap();
    signal(child.id() as i32, Signal::INT);
    assert_eq!(rig::finish(child).code, Some(130));
}
