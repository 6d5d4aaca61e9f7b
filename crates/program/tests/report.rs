//! The page of `phalanx report`.

use std::fs;

use crate::rig::Home;

/// The text of the element with this `data-name`.
fn figure(page: &str, name: &str) -> String {
    let (_, rest) =
        page.split_once(&format!("data-name=\"{name}\">")).unwrap_or_else(|| panic!("no {name} in: {page}"));
    rest.split('<').next().unwrap().to_string()
}

/// The page has the numbers of the run's files, asks for nothing else, and another page alone may replace it.
#[test]
fn a_page_has_the_numbers_of_its_runs() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "one", "--nproc", "2", "--quiet"]).ok();
    home.run(&[
        "train",
        "small.toml",
        "--run",
        "two",
        "--quiet",
        "--set",
        "optimizer.kind=lion",
        "--set",
        "schedule.kind=wsd",
    ])
    .ok();
    assert_eq!(home.run(&["report", "one"]).ok().stdout, "one/report.html\n");
    let page = String::from_utf8(home.read("one/report.html")).unwrap();
    let lines = home.metrics("one");
    let last = |name: &str| {
        format!("{:.4}", lines.iter().filter_map(|line| line[name].as_f64()).next_back().unwrap())
    };
    assert_eq!(figure(&page, "step"), "8 of 8");
    assert_eq!(figure(&page, "loss"), last("loss"));
    assert_eq!(figure(&page, "validation-loss"), last("val_loss"));
    for rank in home.json("one/memory.json")["ranks"].as_array().unwrap() {
        let bytes = rank["device"]["peak_bytes"].as_u64().unwrap();
        assert!(page.contains(&format!("title=\"{bytes} bytes\"")), "{bytes} of rank {}", rank["rank"]);
    }
    assert!(page.matches("to the byte").count() >= 2 && !page.contains("not yet"), "{page}");
    assert_eq!(page.matches("<polyline").count(), 5, "{page}");
    for outside in ["http:", "https:", "<script", "src=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    // Again, also of a run whose last line is cut off.
    fs::write(home.path("one/metrics.jsonl"), [home.read("one/metrics.jsonl"), b"{\"st".to_vec()].concat())
        .unwrap();
    home.run(&["report", "one", "two", "--out", "one/report.html"]).ok();
    let both = String::from_utf8(home.read("one/report.html")).unwrap();
    assert!(
        both.contains("<td>optimizer.kind</td><td>&quot;adamw&quot;</td><td>&quot;lion&quot;</td>"),
        "{both}"
    );
    home.write("mine.html", "<p>mine");
    home.run(&["report", "one", "--out", "mine.html"]).refused(&["mine.html", "has not written"]);
    home.run(&["report", "one", "--out", "two/config.toml"]).refused(&["two/config.toml"]);
    home.run(&["report", "no-run"]).refused(&["no-run is not a run folder"]);
}
