//! The text of a program: words between spaces, in lines of at most 112 columns.
//!
//! `+P0` takes and `-P0` frees a buffer; `F3.0` runs forward of block 3 of the whole network for micro-batch 0;
//! `all_gather(P0<p0)#1` starts work that `!#1` waits for; `?pub0` waits for a publication that an earlier phase may have started;
//! `|` is where the rank goes on with other things; `[apply]` stands before actions that are skipped where a step is not applied. A buffer is named by its role and its chunk.

use std::fmt;

use super::action::{Action, Buffer, Op, Token, Work};
use super::list::{Extent, Program, Role, Stop};

/// Columns of a line.
const COLUMNS: usize = 112;

impl Program {
    /// The name of a buffer: role and chunk, or stage.
    pub fn name(&self, buffer: Buffer) -> String {
        let spec = self.spec(buffer);
        let letter = match (spec.role, spec.stop) {
            (Role::Norms, _) => return spec.role.letter().to_string(),
            (role, Stop::Home) => role.letter().to_string(),
            (role, Stop::Device) => format!("v{}", role.letter()),
            (role, Stop::Passage) => format!("h{}", role.letter()),
        };
        let state = match spec.role {
            Role::State(number) | Role::Partial(number) => format!(":{number}"),
            Role::Factor(number) => format!(":{number}"),
            _ => String::new(),
        };
        let tile = if let Extent::Tile(tile) = spec.extent { format!(".{tile}") } else { String::new() };
        format!("{letter}{}{state}{tile}", spec.of)
    }

    pub(super) fn guard(&self, action: &Action) -> &'static str {
        match (action.when.apply, action.when.pending) {
            (None, None) => "",
            (Some(true), None) => "[apply] ",
            (Some(false), None) => "[skip] ",
            (None, Some(true)) => "[pending] ",
            (Some(true), Some(true)) => "[apply pending] ",
            (apply, pending) => unreachable!("no pass guards by {apply:?} and {pending:?}"),
        }
    }

    pub(super) fn work(&self, work: Work) -> String {
        let into = self.name(self.writes(work)[0]);
        let from = |sign: char| {
            let first = self.reads(work).first();
            first.map_or(String::new(), |from| format!("{sign}{}", self.name(*from)))
        };
        let row = |tiles: u16| if tiles > 1 { format!(" x{tiles}") } else { String::new() };
        match work {
            Work::AllGather { .. } => format!("all_gather({into}{})", from('<')),
            Work::ReduceScatter { accumulates, .. } => {
                format!("reduce_scatter({into}{})", from(if accumulates { '+' } else { '<' }))
            }
            Work::FromTiles { tiles, .. } => format!("copy({into}{}{})", from('<'), row(tiles)),
            Work::ToTiles { tiles, .. } => format!("copy({into}{}{})", row(tiles), from('<')),
            Work::HostUpdate { operands } => {
                let (reads, writes) = self.operands(operands);
                let names = |all: &[Buffer]| all.iter().map(|b| self.name(*b)).collect::<Vec<_>>().join(",");
                format!("host_update({}<{})", names(writes), names(reads))
            }
            Work::AllReduce { group, buffer } => match self.spec(buffer).role {
                Role::Gradient | Role::Rounded => format!("all_reduce({into})"),
                _ => format!("all_reduce({into}:{})", group.name()),
            },
        }
    }

    /// The word of an action, without its guard.
    pub fn word(&self, action: &Action) -> String {
        let name = |buffer| self.name(buffer);
        let pair = |verb: &str, from, into| format!("{verb}({}<{})", name(into), name(from));
        match action.op {
            Op::Take(buffer) => format!("+{}", name(buffer)),
            Op::Free(buffer) => format!("-{}", name(buffer)),
            Op::Run { pass, stage, block, micro_batch, .. } => {
                let first = self.first_blocks.iter().find(|(index, _)| *index == usize::from(stage));
                let block = usize::from(block) + first.map_or(0, |(_, first)| *first);
                format!("{}{block}.{micro_batch}", pass.letter())
            }
            Op::Pause => "|".to_string(),
            Op::Clear(buffer) => format!("clear({})", name(buffer)),
            Op::Convert { from, into } => pair("convert", from, into),
            Op::Add { from, into } => format!("add({}+{})", name(into), name(from)),
            Op::CopyPart { from, into } => pair("copy", from, into),
            Op::Pack { from, into } => pair("pack", from, into),
            Op::Unpack { from, into } => pair("unpack", from, into),
            Op::Look(buffer) => format!("look({})", name(buffer)),
            Op::Count { from, into } => pair("count", from, into),
            Op::Total { from, into } => pair("total", from, into),
            Op::Norm(buffer) => format!("norm({})", name(buffer)),
            Op::Fetch => "fetch(apply)".to_string(),
            Op::Update { gradient, parameters, states } => {
                let (_, states) = self.operands(states);
                let written: Vec<String> = states.iter().chain([&parameters]).map(|b| name(*b)).collect();
                format!("update({}<{})", written.join(","), name(gradient))
            }
            Op::Factor(buffer) => format!("factor({})", name(buffer)),
            Op::Swap(one, other) => format!("swap({},{})", name(one), name(other)),
            Op::CountNotFinite { from, into } => pair("count_not_finite", from, into),
            Op::Mask(buffer) => format!("mask({})", name(buffer)),
            Op::Restore { from, into } => pair("restore", from, into),
            Op::Start { token, work } => format!("{}{}", self.work(work), token_name(token)),
            Op::Wait(token) => format!("!{}", token_name(token)),
            Op::Land(token) => format!("?{}", token_name(token)),
        }
    }

    /// The word of an action, behind its guard.
    pub fn guarded_word(&self, action: &Action) -> String {
        format!("{}{}", self.guard(action), self.word(action))
    }

    /// The resident buffers, by memory and role, with their bytes.
    pub fn storage(&self) -> Vec<String> {
        let mut lines: Vec<(String, u64, usize)> = Vec::new();
        for spec in self.buffers.iter().filter(|spec| spec.is_resident) {
            let title = format!("{} {} in {} memory", spec.role.letter(), spec.name, spec.memory.name());
            match lines.iter_mut().find(|(known, ..)| *known == title) {
                Some((_, bytes, count)) => (*bytes, *count) = (*bytes + spec.bytes(), *count + 1),
                None => lines.push((title, spec.bytes(), 1)),
            }
        }
        let line = |(title, bytes, count)| format!("{title}: {count}, {bytes} bytes");
        lines.into_iter().map(line).collect()
    }
}

fn token_name(token: Token) -> String {
    match (token.published_chunk(), token.updated_tile()) {
        (Some(chunk), _) => format!("pub{chunk}"),
        (_, Some(tile)) => format!("up{tile}"),
        _ => format!("#{}", token.number()),
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut column, mut guard) = (0, "");
        for action in &self.actions {
            let own = self.guard(action);
            let begins = own != guard;
            let word = if begins { format!("{own}{}", self.word(action)) } else { self.word(action) };
            if column > 0 && (begins || column + 1 + word.len() > COLUMNS) {
                f.write_str("\n")?;
                column = 0;
            }
            let before = if column > 0 { " " } else { "" };
            write!(f, "{before}{word}")?;
            (column, guard) = (column + before.len() + word.len(), own);
        }
        Ok(())
    }
}
