//! A model folder and its tokenizer are one thing: trained, imported, resumed and exported together.

use std::fs;

use crate::rig::Home;

/// The folder of an exported model that has learned characters.
fn model_of_characters(home: &Home) {
    home.run(&["train", "small.toml", "--run", "r", "--set", "data.tokenizer=char", "--quiet"]).ok();
    home.run(&["export", "r", "--out", "hf"]).ok();
    let text = String::from_utf8(home.read("text.txt")).unwrap();
    home.write("others.txt", text.to_uppercase());
    for (tokenizer, out) in [("byte", "byte.bin"), ("char", "char.bin")] {
        home.run(&["tokenize", "--tokenizer", tokenizer, "--out", out, "text.txt"]).ok();
    }
    home.write("nano.bin", [1, 0, 2, 0, 3, 0].repeat(500));
}

#[test]
fn a_model_folder_and_its_tokenizer_are_one_thing() {
    let home = Home::new();
    model_of_characters(&home);
    let train = |run: &str, sets: &[&str]| {
        let mut args = vec!["train", "small.toml", "--run", run, "--set", "model.init=hf"];
        sets.iter().for_each(|set| args.extend(["--set", set]));
        home.run(&args)
    };
    // The tokenizer is the folder's unless another is given, and it is said which.
    let ended = train("own", &[]).ok();
    let told = "tokenizer: tokenizer.json (WordLevel), 16 ids of hf; between documents: nothing";
    assert!(ended.stderr.contains(told), "{}", ended.stderr);
    let char = train("char", &["data.tokenizer=char"]).ok();
    assert!(char.stderr.contains("has the ids of the tokenizer of hf"), "{}", char.stderr);
    assert_eq!(home.losses("own"), home.losses("char"));
    let tokens = train("tokens", &["data.text=[]", "data.tokens=char.bin"]).ok();
    assert_eq!(home.losses("own"), home.losses("tokens"), "{}", tokens.stderr);
    // Another is refused by `train` and `plan` before anything is written.
    let other = "data.text=others.txt";
    for (sets, given) in [
        (&["data.tokenizer=byte"][..], "data.tokenizer = \"byte\""),
        (&["data.tokenizer=char", other], "data.tokenizer = \"char\""),
        (&["data.text=[]", "data.tokens=byte.bin"], "byte.bin\" makes ids (byte, 256 ids)"),
    ] {
        let words =
            [given, "the model of hf has learned (tokenizer.json (WordLevel), 16 ids)", "data.new_tokenizer"];
        let refused = train("no", sets).refused(&words);
        let of_file = given.contains("byte.bin");
        assert_eq!(refused.stderr.contains("leave data.tokenizer out"), !of_file, "{}", refused.stderr);
        assert_eq!(refused.stderr.contains("phalanx tokenize --tokenizer"), of_file, "{}", refused.stderr);
        assert!(!home.path("no").exists());
        let mut args = vec!["plan", "small.toml", "--set", "model.init=hf"];
        sets.iter().for_each(|set| args.extend(["--set", set]));
        home.run(&args).refused(&words);
    }
    // It is learned anew where that is said, and only for this start.
    let anew = train("anew", &["data.tokenizer=char", other, "data.new_tokenizer=true"]).ok();
    assert!(anew.stderr.contains("learns these ids anew"), "{}", anew.stderr);
    assert!(!String::from_utf8(home.read("anew/config.toml")).unwrap().contains("new_tokenizer"));
    // Without a tokenizer, it is said what the ids are taken for, and the run keeps the folder's.
    let nano = train("nano", &["data.text=[]", "data.tokens=nano.bin"]).ok();
    assert!(nano.stderr.contains("holds no tokenizer: its ids are taken for those of hf"), "{}", nano.stderr);
    home.run(&["sample", "nano", "--prompt", "rank", "--tokens", "2"]).ok();
}

#[test]
fn an_imported_run_keeps_the_tokenizer_of_its_folder_and_its_files() {
    let home = Home::new();
    model_of_characters(&home);
    for (name, content) in [
        ("special_tokens_map.json", "{ }"),
        ("chat_template.jinja", "{{ messages }}\n"),
        ("generation_config.json", "{\n \"do_sample\": true\n}"),
    ] {
        home.write(&format!("hf/{name}"), content);
    }
    let ended = home.run(&["import", "hf", "--run", "i"]).ok();
    assert!(ended.stdout.contains("tokenizer: tokenizer.json (WordLevel), 16 ids of hf"), "{}", ended.stdout);
    home.run(&["export", "i", "--out", "back"]).ok();
    // The model card says where a model comes from.
    let is_card = |path: &std::path::Path| path.ends_with("README.md");
    let contents = |folder: &str| {
        let files = home.snapshot(folder).into_iter().filter(|(path, _)| !is_card(path));
        files.map(|(_, content)| content).collect::<Vec<_>>()
    };
    assert_eq!(contents("hf"), contents("back"));
    let resume = |run: &str, more: &[&str]| {
        let args = ["train", "--run", run, "--resume", "--set", "train.steps=2", "--set", "model.seq=16"];
        home.run(&[&args[..], &["--set", "batch.global=4"], more].concat())
    };
    // At step 0, another tokenizer is refused as later.
    let before = home.snapshot("i");
    for other in [
        ["--data=text.txt", "--set=data.tokenizer=byte"],
        ["--set=data.text=[]", "--set=data.tokens=byte.bin"],
    ] {
        resume("i", &other).refused(&["has learned", "data.new_tokenizer"]);
        assert_eq!(home.snapshot("i"), before);
    }
    // The folder may be gone by then.
    fs::rename(home.path("hf"), home.path("away")).unwrap();
    resume("i", &["--data", "text.txt"]).ok();
    home.run(&["export", "i", "--out", "trained"]).ok();
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"] {
        assert_eq!(home.read(&format!("trained/{file}")), home.read(&format!("away/{file}")), "{file}");
    }
}

#[test]
fn nothing_is_taken_for_bytes_where_a_folder_has_no_tokenizer() {
    let home = Home::new();
    model_of_characters(&home);
    fs::remove_file(home.path("hf/tokenizer.json")).unwrap();
    let init = ["train", "small.toml", "--run", "n", "--set", "model.init=hf"];
    home.run(&init).refused(&["hf came without a tokenizer", "data.tokenizer"]);
    let given = home.run(&[&init[..], &["--set", "data.tokenizer=char"]].concat()).ok();
    assert!(given.stderr.contains("the ids of hf are taken for these; no file says so"), "{}", given.stderr);
    let ended = home.run(&["import", "hf", "--run", "i"]).ok();
    assert!(ended.stdout.contains("hf has no tokenizer files"), "{}", ended.stdout);
    assert!(ended.stdout.contains("tokenizer_config.json of hf is not used or kept"), "{}", ended.stdout);
    let resume = ["train", "--run", "i", "--resume", "--set", "train.steps=1", "--data", "text.txt"];
    home.run(&resume).refused(&["came without a tokenizer"]);
    // What belongs to the model alone is written back by every export: at once, and after training with a tokenizer.
    let generation = "{\n \"do_sample\": true\n}";
    home.write("hf/generation_config.json", generation);
    home.run(&["import", "hf", "--run", "g"]).ok();
    home.run(&["train", "small.toml", "--run", "t", "--set=model.init=hf", "--set=data.tokenizer=char"]).ok();
    let resume =
        ["train", "--run", "g", "--resume", "--set=train.steps=1", "--set=model.seq=16", "--data=text.txt"];
    let resume = [&resume[..], &["--set=batch.global=4", "--set=data.tokenizer=char"]].concat();
    for (run, out) in [("g", "at-once"), ("g", "trained"), ("t", "init")] {
        home.run(&["export", run, "--out", out]).ok();
        assert_eq!(home.read(&format!("{out}/generation_config.json")), generation.as_bytes(), "{out}");
        if out == "at-once" {
            home.run(&resume).ok();
        }
    }
    // Ids that are learned anew are not those of that file.
    let anew = ["--set=train.steps=2", "--data=others.txt", "--set=data.new_tokenizer=true"];
    let resume: Vec<&str> = resume.into_iter().filter(|word| !word.starts_with("--data")).collect();
    home.run(&[&resume[..], &anew].concat()).ok();
    home.run(&["export", "g", "--out", "anew"]).ok();
    assert!(!String::from_utf8(home.read("anew/generation_config.json")).unwrap().contains("do_sample"));
    // A vocabulary that only another library reads is named, with the way out.
    home.write("hf/tokenizer.model", "\n");
    home.run(&["import", "hf", "--run", "s"]).refused(&[
        "tokenizer.model",
        "SentencePiece",
        "save_pretrained",
    ]);
    let again = ["train", "small.toml", "--run", "m", "--set", "model.init=hf"];
    home.run(&again).refused(&["tokenizer.model", "SentencePiece"]);
}

/// The same run as an earlier version would have left it: with `tokenizer` as its `tokenizer.json`, fewer checksums, and
/// checkpoints that do not say which data and tokenizer they have learned.
fn make_earlier(home: &Home, run: &str, tokenizer: &[u8]) {
    home.write(&format!("{run}/tokenizer.json"), tokenizer);
    let path = format!("{run}/checksums.json");
    let mut checksums = home.json(&path);
    checksums
        .as_object_mut()
        .unwrap()
        .retain(|name, _| ["config.toml", "given.toml", "tokens"].contains(&&name[..]));
    home.write(&path, checksums.to_string());
    for step in home.checkpoints(run) {
        let path = format!("{run}/checkpoints/step-{step}/manifest.json");
        let mut manifest = home.json(&path);
        manifest.as_object_mut().unwrap().remove("blake3");
        manifest["state"].as_object_mut().unwrap().remove("data");
        let text = serde_json::to_string_pretty(&manifest).unwrap();
        let rest = text.strip_prefix("{\n").unwrap();
        home.write(
            &path,
            format!("{{\n  \"blake3\": \"{}\",\n{rest}\n", blake3::hash(rest.as_bytes()).to_hex()),
        );
    }
}

/// Runs of earlier versions kept a folder's `tokenizer.json` alone, and nothing that separates documents of bytes and characters.
#[test]
fn runs_of_earlier_versions_keep_their_tokenizers() {
    let home = Home::new();
    model_of_characters(&home);
    let more = |run: &str, sets: &[&str]| {
        let args = [
            "train",
            "--run",
            run,
            "--resume",
            "--quiet",
            "--set",
            "model.seq=16",
            "--set",
            "batch.global=4",
        ];
        home.run(&[&args[..], sets].concat())
    };
    home.run(&["import", "hf", "--run", "now"]).ok();
    home.copy("now", "before");
    make_earlier(&home, "before", &home.read("hf/tokenizer.json"));
    for run in ["now", "before"] {
        more(run, &["--data=text.txt", "--set=train.steps=2"]).ok();
        home.run(&["export", run, "--out", &format!("{run}-hf")]).ok();
        more(run, &["--data=others.txt", "--set=train.steps=3", "--set=data.tokenizer=char"])
            .refused(&["has learned"]);
    }
    assert_eq!(home.losses("now"), home.losses("before"));
    assert_eq!(home.read("before-hf/tokenizer.json"), home.read("hf/tokenizer.json"));
    // Bytes and characters: the run goes on with the ids that it has, and an export gives no token a role.
    for tokenizer in ["byte", "char"] {
        let [now, before, out] = ["now", "before", "hf"].map(|name| format!("{tokenizer}-{name}"));
        let set = format!("data.tokenizer={tokenizer}");
        home.run(&["train", "small.toml", "--run", &now, "--set", &set, "--quiet"]).ok();
        home.copy(&now, &before);
        let kept = home.read(&format!("{now}/tokenizer.json"));
        assert!(!String::from_utf8_lossy(&kept).contains("separated"));
        make_earlier(&home, &before, &kept);
        for run in [&now, &before] {
            home.run(&["train", "--run", run, "--resume", "--quiet", "--set", "train.steps=12"]).ok();
        }
        assert_eq!(home.losses(&now), home.losses(&before));
        home.run(&["export", &before, "--out", &out]).ok();
        let ids = home.json(&format!("{out}/config.json"));
        assert!(ids["eos_token_id"].is_null() && ids["bos_token_id"].is_null(), "{ids}");
        assert_eq!(home.read(&format!("{before}/tokenizer.json")), kept);
        // Several documents of other text: said what lies between them.
        home.write("copy.txt", home.read("text.txt"));
        let other = [
            "train",
            "--run",
            &before,
            "--resume",
            "--set",
            "train.steps=13",
            "--data",
            "text.txt",
            "copy.txt",
        ];
        let ended = home.run(&other);
        assert!(ended.stderr.contains("between documents"), "{}", ended.stderr);
    }
}
