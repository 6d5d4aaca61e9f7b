//! Schedules: random rows, invalid cells, endless rows.

use crate::hostile::Random;
use crate::reliability::groups::hostile::{Attempt, flip};
use crate::reliability::world::Case;

pub(super) fn make(case: &Case<'_>, random: &mut Random) -> Result<Attempt, String> {
    let (input, text) = match random.below(6) {
        0 | 1 => random_rows(random),
        2 => right_but_one(random),
        3 => {
            let rows = 10usize.pow(1 + random.below(4) as u32) * 10;
            (format!("{rows} rows"), "0F0,0B0\n".repeat(rows).into_bytes())
        }
        4 => {
            let cells = 10usize.pow(1 + random.below(5) as u32);
            let row: Vec<String> = (0..cells).map(|i| format!("0F{i}")).collect();
            (format!("a row of {cells} cells"), row.join(",").into_bytes())
        }
        _ => {
            let count = random.below(2000);
            (format!("{count} random bytes"), random.bytes(count))
        }
    };
    case.write("rows.csv", &text)?;
    let words: &[&str] = match random.below(3) {
        0 => &["plan", "small.toml", "--set", "parallel.schedule=rows.csv", "--set", "parallel.pipeline=2"],
        1 => &["plan", "--schedule", "rows.csv", "--json"],
        _ => &["plan", "--schedule", "rows.csv"],
    };
    Ok(Attempt::new(input, words.iter().copied()))
}

fn random_rows(random: &mut Random) -> (String, Vec<u8>) {
    let (rows, cells) = (1 + random.below(6), 1 + random.below(20));
    let largest = *random.pick(&[2, 4, 100, usize::MAX]);
    let mut text = String::new();
    for _ in 0..rows {
        let cell = |random: &mut Random| {
            let action = *random.pick(&["F", "B", "I", "W", "F", "B", "X", "", "FB"]);
            match random.chance(0.1) {
                true => String::new(),
                false => format!("{}{action}{}", random.below(largest), random.below(largest)),
            }
        };
        let row: Vec<String> = (0..cells).map(|_| cell(random)).collect();
        text += &(row.join(",") + "\n");
    }
    (format!("{rows} rows of {cells} random cells"), text.into_bytes())
}

fn right_but_one(random: &mut Random) -> (String, Vec<u8>) {
    let mut text = b"0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n".to_vec();
    flip(&mut text, random);
    ("a schedule with flipped bytes".to_string(), text)
}
