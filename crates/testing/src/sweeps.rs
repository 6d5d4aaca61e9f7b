//! Sweeps over many cases: the short lane tries a share of them, `cargo xtask nightly` all.

/// With `whole`, every case of each sweep is tried.
const VARIABLE: &str = "PHALANX_TEST_SWEEPS";

/// Returns whether every case is tried.
///
/// # Panics
/// If the variable has a value other than `whole`.
pub fn are_whole() -> bool {
    match std::env::var_os(VARIABLE) {
        None => false,
        Some(word) if word == "whole" => true,
        Some(word) => panic!("{VARIABLE}={}: expected \"whole\", or no such variable", word.display()),
    }
}

/// Each `each`-th of `cases`, from the one with number `first` modulo `each` on; all where sweeps are whole. Tests that go through
/// the same cases in several surroundings number these by `first`, so that `each` of them try every case.
pub fn share<T>(cases: &[T], first: usize, each: usize) -> impl Iterator<Item = &T> {
    let (first, each) = if are_whole() { (0, 1) } else { (first % each, each) };
    cases.iter().skip(first).step_by(each)
}
