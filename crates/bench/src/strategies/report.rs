//! The comparison as tables and bars in a terminal, and as JSON.

use phalanx_drawing::report::{Table, bytes, percent, seconds};
use phalanx_plan::Peak;
use phalanx_plan::trace::Category;
use serde_json::{Value, json};

use super::agreement::{Agreement, Apart, Difference};
use super::run::{StrategyFigures, StrategyRun};
use super::strategy::Strategy;

/// The letter that draws each category of memory in a bar.
const BLOCKS: [char; 6] = ['█', '▓', '▒', '░', '▚', '▖'];

/// Fewest letters of the longest bar.
const MIN_BAR: usize = 20;

/// Seconds of a step, which may be very small: three digits below 100 ms.
pub fn step_time(of: f64) -> String {
    match of {
        s if s < 1e-4 => seconds(s),
        s if s < 1e-2 => format!("{:.2} ms", s * 1e3),
        s if s < 1e-1 => format!("{:.1} ms", s * 1e3),
        s => seconds(s),
    }
}

/// The strategies that ran, with their figures.
fn ran(rows: &[StrategyRun]) -> impl Iterator<Item = (&StrategyRun, &StrategyFigures)> {
    rows.iter().filter_map(|row| Some((row, row.ran.as_ref().ok()?)))
}

/// Median step of one device, if it ran.
fn one_device_s(rows: &[StrategyRun]) -> Option<f64> {
    ran(rows).find(|(row, _)| row.strategy == Strategy::OneDevice).map(|(_, ran)| ran.median_and_min().0)
}

/// The whole comparison as text, in lines of at most `width` letters.
pub fn to_text(rows: &[StrategyRun], agreement: &Result<Agreement, String>, width: usize) -> String {
    let left_out: Vec<String> = rows
        .iter()
        .filter_map(|row| {
            Some(format!("  {} does not run: {}\n", row.strategy.name(), row.ran.as_ref().err()?))
        })
        .collect();
    format!(
        "{}{}\nMemory by category of the rank that holds most\n{}\n{}\n{}",
        times(rows),
        left_out.concat(),
        memory(rows),
        bars(rows, width),
        agreement_text(agreement)
    )
}

/// A table with one row per strategy: time, bytes moved, loss.
fn times(rows: &[StrategyRun]) -> String {
    let one = one_device_s(rows);
    let of = |row: &StrategyRun, otherwise: &str, text: &dyn Fn(&StrategyFigures) -> String| {
        row.ran.as_ref().map_or(otherwise.to_string(), text)
    };
    let of_one = |median: f64| one.map_or("-".into(), |one| format!("{:.2}", median / one));
    let table = Table::of(
        rows,
        &[
            ("strategy", &|row| row.strategy.name().to_string()),
            ("ranks x threads", &|row| format!("{} x {}", row.ranks, row.threads)),
            ("micro-batches", &|row| of(row, "-", &|ran| ran.micro_batches.to_string())),
            ("step, median", &|row| of(row, "does not run", &|ran| step_time(ran.median_and_min().0))),
            ("min", &|row| of(row, "", &|ran| step_time(ran.median_and_min().1))),
            ("of one device", &|row| of(row, "", &|ran| of_one(ran.median_and_min().0))),
            ("moved a step", &|row| of(row, "", &|ran| bytes(ran.sent_bytes()))),
            ("waited", &|row| of(row, "", &|ran| step_time(ran.exposed_s()))),
            ("bubble", &|row| of(row, "", &|ran| ran.bubble.map_or("-".into(), percent))),
            ("loss", &|row| of(row, "", &|ran| format!("{:.5}", ran.loss()))),
        ],
    );
    table.to_string()
}

/// A table with one row per strategy: the memory that its ranks hold.
fn memory(rows: &[StrategyRun]) -> String {
    let mut headings = vec!["strategy", "largest rank", "smallest", "measured"];
    headings.extend(Category::ALL.map(Category::name));
    let mut table = Table::new(&headings);
    for (row, ran) in ran(rows) {
        let (largest, smallest) = ran.largest_and_smallest();
        let planned = |rank: usize| ran.ranks[rank].planned;
        let measured = match ran.as_planned() {
            true => "as planned".to_string(),
            false => match (ran.ranks[largest].measured, planned(largest)) {
                (measured, planned) if measured.bytes == planned.bytes => "other categories".to_string(),
                (measured, _) => bytes(measured.bytes),
            },
        };
        let sizes =
            [row.strategy.name().to_string(), bytes(planned(largest).bytes), bytes(planned(smallest).bytes)];
        let categories = Category::ALL.map(|category| bytes(planned(largest).categories.get(category)));
        table.row(sizes.into_iter().chain([measured]).chain(categories));
    }
    table.to_string()
}

/// Bars of memory, ranks that hold the same in one, and of step times.
fn bars(rows: &[StrategyRun], width: usize) -> String {
    let largest =
        ran(rows).flat_map(|(_, ran)| &ran.ranks).map(|rank| rank.measured.bytes).max().unwrap_or(0);
    let slowest = ran(rows).map(|(_, ran)| ran.median_and_min().0).fold(0.0, f64::max);
    // Names and figures take 50.
    let room = width.saturating_sub(50).max(MIN_BAR);
    let legend =
        Category::ALL.iter().zip(BLOCKS).map(|(category, block)| format!("{block} {}", category.name()));
    let mut text = format!("Memory, measured: {}\n", legend.collect::<Vec<_>>().join("  "));
    for (row, ran) in ran(rows) {
        for (who, peak) in alike(row, ran) {
            text.push_str(&format!(
                "  {who:<34} {:>10} {}\n",
                bytes(peak.bytes),
                stacked(peak, largest, room)
            ));
        }
    }
    text.push_str("Step, median\n");
    for (row, ran) in ran(rows) {
        let median = ran.median_and_min().0;
        let letters = (median / slowest.max(f64::MIN_POSITIVE) * room as f64).round() as usize;
        let bar = "█".repeat(letters.max(1));
        text.push_str(&format!("  {:<34} {:>10} {bar}\n", row.strategy.name(), step_time(median)));
    }
    text
}

/// Groups neighbouring ranks with the same memory: `zero-3, ranks 0 to 3`.
fn alike<'a>(row: &StrategyRun, ran: &'a StrategyFigures) -> Vec<(String, &'a Peak)> {
    let (name, what) = (row.strategy.name(), if row.strategy.is_data_parallel() { "device" } else { "rank" });
    let mut first = 0;
    let groups = ran.ranks.chunk_by(|one, other| one.measured == other.measured).map(|ranks| {
        let who = match ranks.len() {
            1 => format!("{name}, {what} {first}"),
            count => format!("{name}, {what}s {first} to {}", first + count - 1),
        };
        first += ranks.len();
        (who, &ranks[0].measured)
    });
    groups.collect()
}

/// A bar of at most `room` letters. Parts end at rounded sums, so that the bar is as long as its total.
fn stacked(peak: &Peak, largest: u64, room: usize) -> String {
    let place = |sum: u64| (sum as f64 / largest.max(1) as f64 * room as f64).round() as usize;
    let (mut sum, mut bar) = (0, String::new());
    for (category, block) in Category::ALL.into_iter().zip(BLOCKS) {
        let before = place(sum);
        sum += peak.categories.get(category);
        bar.extend(std::iter::repeat_n(block, place(sum) - before));
    }
    bar
}

/// The last lines: whether the strategies compute the same training.
fn agreement_text(found: &Result<Agreement, String>) -> String {
    let found = match found {
        Ok(found) => found,
        Err(reason) => return format!("The strategies were not compared: {reason}\n"),
    };
    let Agreement { reference: (first, loss), others, step, gradient, loss: losses, apart, other_steps } =
        found;
    let left_out = match &other_steps[..] {
        [] => String::new(),
        left_out => {
            let names: Vec<&str> = left_out.iter().map(|strategy| strategy.name()).collect();
            format!("Not compared, because other steps overflowed: {}\n", names.join(", "))
        }
    };
    let losses = format!(
        "losses differ by at most {:.1e} (a run in another precision allows {:.1e})",
        losses.found, losses.allowed
    );
    if apart.is_empty() {
        return format!(
            "All {} synchronous strategies compute the same gradients in step {step} within rounding (largest difference \
             {:.1e} of a gradient, rounding allows {:.1e} there); {losses}; last loss {loss:.5}\n{left_out}",
            others + 1,
            gradient.found,
            gradient.allowed
        );
    }
    let mut text = format!("Not the same training as {} (last loss {loss:.5}):\n", first.name());
    for Apart { strategy, parameter, difference: Difference { found, allowed } } in apart {
        let what = match parameter {
            Some(name) => format!("the gradient of {name} in step {step} differs by {found:.1e} of its norm"),
            None => {
                format!("the gradients of step {step} agree, but losses of later steps differ by {found:.1e}")
            }
        };
        text.push_str(&format!("  {}: {what}; rounding allows {allowed:.1e}\n", strategy.name()));
    }
    text + "This is a bug of the engine\n" + &left_out
}

/// The comparison as JSON.
pub fn to_json(rows: &[StrategyRun], agreement: &Result<Agreement, String>) -> Value {
    let one = one_device_s(rows);
    json!({
        "ways": rows.iter().map(|row| row_json(row, one)).collect::<Vec<_>>(),
        "agreement": agreement_json(agreement),
    })
}

fn agreement_json(agreement: &Result<Agreement, String>) -> Value {
    let found = match agreement {
        Ok(found) => found,
        Err(reason) => return json!({ "reason": reason }),
    };
    let difference = |of: &Difference| json!({ "largest": of.found, "allowed": of.allowed });
    let apart = |of: &Apart| json!({ "way": of.strategy.name(), "parameter": of.parameter, "difference": difference(&of.difference) });
    json!({
        "agree": found.apart.is_empty(), "reference": found.reference.0.name(), "compared": found.others,
        "step": found.step, "gradients": difference(&found.gradient), "losses": difference(&found.loss),
        "apart": found.apart.iter().map(apart).collect::<Vec<_>>(),
        "not_compared": found.other_steps.iter().map(|strategy| strategy.name()).collect::<Vec<_>>(),
    })
}

fn row_json(row: &StrategyRun, one: Option<f64>) -> Value {
    let StrategyRun { strategy, ranks, threads, ran } = row;
    let ran = match ran {
        Err(reason) => {
            return json!({ "way": strategy.name(), "ranks": ranks, "threads": threads, "reason": reason });
        }
        Ok(ran) => ran,
    };
    let (median, min) = ran.median_and_min();
    let by_rank = ran.ranks.iter().map(|rank| {
        json!({
            "planned": rank.planned, "measured": rank.measured, "sent_bytes_per_step": rank.sent_bytes,
            "exposed_s": rank.exposed_s,
        })
    });
    json!({
        "way": strategy.name(), "ranks": ranks, "threads": threads, "micro_batches": ran.micro_batches,
        "step_s_median": median, "step_s_min": min, "step_s": ran.step_s(),
        "of_one_device": one.map(|one| median / one), "as_planned": ran.as_planned(),
        "by_rank": by_rank.collect::<Vec<_>>(), "sent_bytes_per_step": ran.sent_bytes(),
        "exposed_s": ran.exposed_s(), "bubble_fraction": ran.bubble, "loss": ran.loss(),
        "losses": ran.ranks[0].losses,
    })
}

#[cfg(test)]
mod tests {
    use super::super::compared::made_up;
    use super::*;

    #[test]
    fn bars_are_as_long_as_what_they_stand_for() {
        let Ok(ran) = made_up::row(Strategy::Ddp, &[4 << 20, 1 << 20], 5.0).ran else {
            unreachable!("it ran")
        };
        let bar = |rank: usize| stacked(&ran.ranks[rank].measured, 4 << 20, 40);
        assert_eq!(bar(0), format!("{}{}", "█".repeat(20), "░".repeat(20)));
        assert_eq!(bar(1), format!("{}{}", "█".repeat(5), "░".repeat(5)));
    }

    #[test]
    fn every_strategy_has_its_rows_and_one_that_does_not_run_its_reason() {
        let rows = made_up::rows();
        let mut found = Agreement {
            reference: (Strategy::OneDevice, 5.25),
            others: 10,
            step: 1,
            gradient: Difference { found: 1e-6, allowed: 2e-5 },
            loss: Difference { found: 0.25, allowed: 0.5 },
            apart: Vec::new(),
            other_steps: vec![Strategy::Zero1],
        };
        let text = to_text(&rows, &Ok(found.clone()), 110);
        for strategy in Strategy::ALL {
            assert!(text.contains(strategy.name()), "{strategy:?}: {text}");
        }
        for words in [
            "pipeline-zb-h1 does not run: parallel.pipeline = 2",
            "data-parallel, device 0",
            "zero-3, rank 1",
            "as planned",
            "All 11 synchronous strategies compute the same gradients in step 1 within rounding",
            "rounding allows 2.0e-5 there); losses differ by at most 2.5e-1",
            "Not compared, because other steps overflowed: zero-1",
        ] {
            assert!(text.contains(words), "no {words:?} in {text}");
        }
        assert!(
            text.lines().filter(|line| line.contains('█')).all(|line| line.chars().count() <= 110),
            "{text}"
        );
        let parameter = Some("wte.weight".to_string());
        found.apart = vec![Apart { strategy: Strategy::Ddp, parameter, difference: found.loss }];
        let text = to_text(&rows, &Ok(found), 110);
        for words in
            ["Not the same training as one-device", "ddp: the gradient of wte.weight in step 1", "bug"]
        {
            assert!(text.contains(words), "no {words:?} in {text}");
        }
        let text = to_text(&rows, &Err("a reason".into()), 110);
        assert!(text.contains("were not compared: a reason"), "{text}");
    }
}
