//! Two commands in one run folder at once.
//!
//! One of two writers completes, with the same numbers as when it runs alone, and the other is refused with the process id
//! of the first. Commands that read never find a checkpoint damaged because a running purge takes it away.

use std::time::Duration;

use crate::hostile::Random;
use crate::reliability::mesh::{ALONE, Mesh, PAIR};
use crate::reliability::phase::{pause, reached};
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

const READERS: [&[&str]; 3] = [
    &["sample", "r", "--prompt", "rank", "--tokens", "4", "--json"],
    &["inspect", "r", "--verify", "--json"],
    &["export", "r", "--out", "hf", "--json"],
];

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let mesh = random.pick(&[&ALONE, &PAIR]);
    let (fault, result) = match number % 4 {
        0 => ("two starts", world.case().and_then(|case| two_writers(&case, mesh, [false, false], random))),
        1 => (
            "a start and a resume",
            world.case().and_then(|case| two_writers(&case, mesh, [false, true], random)),
        ),
        2 => ("two resumes", world.case().and_then(|case| two_writers(&case, mesh, [true, true], random))),
        _ => ("readers beside a purge", world.case().and_then(|case| readers(&case, random, number))),
    };
    Trial::new(fault, format!("{fault}, {}", mesh.name), result)
}

fn two_writers(case: &Case<'_>, mesh: &Mesh, resumes: [bool; 2], random: &mut Random) -> Result<(), String> {
    let reference = case.world.reference(mesh)?;
    let words = |resume| if resume { mesh.resume() } else { mesh.train(&["--quiet"]) };
    let mut first = case.phalanx(words(resumes[0])).start()?;
    let first_pid = first.pid();
    pause(reference.whole.mul_f64(random.fraction()));
    let second = case.phalanx(words(resumes[1])).start()?;
    let second_pid = second.pid();
    let second = second.finish();
    let first_lived = !first.has_ended();
    let first = first.finish();
    first.orderly()?;
    second.orderly()?;
    let (refused, holder) = match (first.code, second.code) {
        (Some(0), Some(0)) if resumes[1] => {
            // The first had ended: nothing was left to do.
            if first_lived {
                return second.wrong("went on in a folder that another run held");
            }
            return reference.is_equal(&case.path("r"));
        }
        (Some(0), Some(1)) => (&second, first_pid),
        (Some(1), Some(0)) => (&first, second_pid),
        (first_code, second_code) => {
            return second.wrong(&format!(
                "and the first ended with {second_code:?} and {first_code:?}; first: {}",
                first.stderr.trim()
            ));
        }
    };
    let finished = !first_lived && refused.stderr.contains("already holds a run");
    if !finished && !refused.stderr.contains(&holder.to_string()) {
        return refused.wrong(&format!("was refused without the holder's process id {holder}"));
    }
    reference.is_equal(&case.path("r"))
}

fn readers(case: &Case<'_>, random: &mut Random, number: usize) -> Result<(), String> {
    let sets =
        ["--quiet", "--set", "train.save_every=1", "--set", "train.keep=1", "--set", "train.steps=2000"];
    let run = case.path("r");
    let mut writer = case.phalanx(ALONE.train(&sets)).start()?;
    writer.wait_for(Duration::from_secs(8), || reached(&run, 3));
    for turn in 0..4 {
        pause(Duration::from_micros(random.below(3000) as u64));
        let reader = READERS[(number / 4 + turn) % READERS.len()];
        let ended = case.phalanx(reader.iter().copied()).run()?;
        ended.success()?;
        if ended.stderr.contains("damaged") || ended.stderr.contains("skipping") {
            return ended.wrong("found damage where a purge went on");
        }
        let _ = std::fs::remove_dir_all(case.path("hf"));
    }
    if writer.has_ended() {
        return writer.finish().wrong("ended beside its readers");
    }
    Ok(())
}
