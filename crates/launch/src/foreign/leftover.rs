//! Variables of launchers that make this process no rank, although somebody may believe so: they are said, and the run goes on as
//! without them.

use super::variables::Variables;

/// Variables that say something about a rank only beside another one, which is not set.
const INCOMPLETE: [(&str, &[&str]); 3] = [
    ("RANK", &["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
    (
        "OMPI_COMM_WORLD_RANK",
        &["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
    ),
    ("PMI_RANK", &["PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
];

/// The rank, as launchers number it whose other variables are not read.
const UNREAD: [&str; 6] = [
    "PMIX_RANK",
    "PALS_RANKID",
    "ALPS_APP_PE",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
    "MV2_COMM_WORLD_RANK",
];

/// Lines for the user about variables that are not followed. `world`: the number of ranks that a launcher has given, if one did.
pub(super) fn leftovers(variables: &Variables<'_>, world: Option<usize>) -> Vec<String> {
    let mut lines: Vec<String> =
        batch_script(variables).filter(|_| world.is_none_or(|world| world == 1)).into_iter().collect();
    for (rank, others) in INCOMPLETE.into_iter().filter(|(rank, _)| !variables.is_set(rank)) {
        let says_more = |name: &str| {
            let text = variables.text(name)?;
            let known = match world {
                // A world of one rank is one with or without.
                None => text == "1" || text == "0",
                // The others differ from rank to rank.
                Some(world) => name != others[0] || text == world.to_string(),
            };
            (!known).then(|| format!("{name}={text} is set, but {rank} is {}", variables.absence(rank)))
        };
        if let Some(line) = others.iter().find_map(|name| says_more(name)) {
            let meanwhile = match world {
                Some(_) => "the variables of another launcher are followed, not this one",
                None => {
                    "this process is no rank of another launcher, and starts the ranks of its configuration itself"
                }
            };
            lines.push(format!("{line}: {meanwhile}"));
        }
    }
    if let Some((name, rank)) =
        UNREAD.iter().find_map(|name| Some((name, variables.text(name)?))).filter(|_| world.is_none())
    {
        lines.push(format!(
            "{name}={rank} is set by a launcher whose variables are not read: this process starts the ranks of its configuration \
             itself; to be one of that launcher's ranks it needs RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
        ));
    }
    lines
}

/// A batch script, or the shell of an allocation, has the tasks of its job, and is none of them.
fn batch_script(variables: &Variables<'_>) -> Option<String> {
    let name = ["SLURM_NTASKS", "SLURM_NPROCS"].into_iter().find(|name| variables.is_set(name))?;
    let tasks = variables.text(name).filter(|tasks| variables.is_set("SLURM_JOB_ID") && tasks != "1")?;
    Some(format!(
        "{name}={tasks}, but this process is no task of a step with so many (it runs in a batch script or a shell of the \
         allocation): it starts the ranks of its configuration itself; `srun phalanx train ...` makes each task a rank"
    ))
}
