//! A short selection of every group of the fault campaign; `cargo xtask reliability` tries thousands of cases.

use std::path::PathBuf;

use phalanx_testing::reliability::{Campaign, Selection, group_names, run};

#[test]
fn a_short_selection_of_every_group_of_faults() {
    let campaign = Campaign {
        program: PathBuf::from(env!("CARGO_BIN_EXE_phalanx")),
        seed: 1,
        selection: Selection::Short,
        only: None,
        case: None,
        jobs: 2,
    };
    let report = run(&campaign, &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    for group in group_names() {
        let tried = report.rows.keys().any(|(tried, _)| *tried == group);
        match report.skipped.get(group) {
            Some(cause) => println!("{group}: skipped: {cause}"),
            None => assert!(tried, "no case of {group} was tried"),
        }
    }
    assert!(report.failed.is_empty(), "{}", report.failures());
}
