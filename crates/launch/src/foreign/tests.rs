//! Environments of other launchers, as they set them, and with mistakes.

use super::*;

fn whole(variables: &[(&str, &str)]) -> Result<Foreign, EnvironmentError> {
    let find =
        |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string());
    foreign(&Variables::new(&find))
}

fn read(variables: &[(&str, &str)]) -> Result<Option<ForeignRank>, EnvironmentError> {
    whole(variables).map(|foreign| foreign.rank)
}

/// The variables with `change` put in the place of one of them, or behind them.
fn with<'a>(variables: &[(&'a str, &'a str)], change: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let kept = variables.iter().filter(|(name, _)| change.iter().all(|(changed, _)| changed != name));
    kept.chain(change).copied().collect()
}

#[track_caller]
fn refused(variables: &[(&str, &str)], words: &[&str]) {
    let error = read(variables).unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "no {word:?} in: {error}");
    }
}

const TORCHRUN: [(&str, &str); 7] = [
    ("RANK", "5"),
    ("LOCAL_RANK", "1"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "none"),
];

const SLURM: [(&str, &str); 9] = [
    ("SLURM_PROCID", "3"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NTASKS", "5"),
    ("SLURM_STEP_NUM_TASKS", "5"),
    ("SLURM_NODEID", "1"),
    ("SLURM_STEP_NODELIST", "gpu[07-08],big"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "0"),
];

const OPEN_MPI: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
];

const HYDRA: [(&str, &str); 4] =
    [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];

#[test]
fn each_launcher_is_read() {
    let rank = read(&TORCHRUN).unwrap().unwrap();
    assert_eq!((rank.rank, rank.world_size, rank.local_rank, rank.local_world_size), (5, 8, 1, 4));
    assert_eq!((rank.first_of_host(), rank.is_on_one_host()), (4, false));
    assert_eq!(rank.rendezvous, Some(("node0".to_string(), 29500)));
    let agent = read(&with(&TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", "True")])).unwrap().unwrap();
    assert_eq!(agent.rendezvous, Some(("node0".to_string(), 29501)));
    // A pod per rank: no local variables.
    let pod = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1234")];
    let pod = read(&pod).unwrap().unwrap();
    assert_eq!((pod.local_rank, pod.local_world_size, pod.first_of_host()), (0, 1, 1));

    let rank = read(&SLURM).unwrap().unwrap();
    assert_eq!((rank.rank, rank.world_size, rank.local_rank, rank.local_world_size), (3, 5, 1, 2));
    assert_eq!((rank.first_of_host(), rank.job.as_str()), (2, "slurm-4711-0"));
    let (host, port) = rank.rendezvous.unwrap();
    assert_eq!(host, "gpu07");
    assert!((20_000..30_000).contains(&port));
    let own = read(&with(&SLURM, &[("MASTER_ADDR", "x"), ("MASTER_PORT", "7")])).unwrap().unwrap();
    assert_eq!(own.rendezvous, Some(("x".to_string(), 7)));

    for (variables, launcher) in [(OPEN_MPI, ForeignLauncher::OpenMpi), (HYDRA, ForeignLauncher::Hydra)] {
        let rank = read(&variables).unwrap().unwrap();
        assert_eq!((rank.launcher, rank.rank, rank.world_size, rank.local_rank), (launcher, 1, 2, 1));
        assert!(rank.is_on_one_host() && rank.rendezvous.is_none());
    }
}

#[test]
fn a_plain_environment_and_a_world_of_one_rank_are_no_job() {
    assert_eq!(read(&[]).unwrap(), None);
    assert_eq!(read(&[("WORLD_SIZE", "4"), ("RANK", "")]).unwrap(), None);
    // What a batch script sees, outside of any step.
    let batch = [("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "1")];
    assert_eq!(read(&batch).unwrap(), None);
    let names = OPEN_MPI.map(|(name, _)| name);
    let alone: Vec<_> = names.into_iter().zip(["0", "1", "0", "1"]).collect();
    assert_eq!(read(&alone).unwrap(), None);
    assert_eq!(read(&with(&TORCHRUN, &[(CHOICE, "none")])).unwrap(), None);
}

#[test]
fn what_is_missing_or_no_number_is_named() {
    for missing in ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"] {
        refused(&with(&TORCHRUN, &[(missing, "")]), &[missing, "is empty", "PHALANX_LAUNCHER=none"]);
    }
    for missing in ["SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"] {
        refused(&with(&SLURM, &[(missing, "")]), &[missing, "is empty"]);
    }
    refused(&OPEN_MPI[..3], &["OMPI_COMM_WORLD_LOCAL_SIZE"]);
    refused(&HYDRA[..2], &["MPI_LOCALRANKID"]);
    refused(&with(&TORCHRUN, &[("RANK", "-1")]), &["RANK=-1", "expected a number"]);
    refused(&with(&TORCHRUN, &[("WORLD_SIZE", "99999999999")]), &["WORLD_SIZE=99999999999"]);
    refused(&with(&TORCHRUN, &[("MASTER_PORT", "70000")]), &["MASTER_PORT=70000", "1 to 65535"]);
    refused(
        &with(&SLURM, &[("SLURM_STEP_NODELIST", "gpu[1-")]),
        &["SLURM_STEP_NODELIST=gpu[1-", "not closed"],
    );
}

#[test]
fn what_contradicts_itself_is_named() {
    refused(&with(&TORCHRUN, &[("RANK", "8")]), &["rank 8 of 8"]);
    refused(&with(&TORCHRUN, &[("LOCAL_RANK", "4")]), &["local rank 4 of 4"]);
    refused(&with(&TORCHRUN, &[("LOCAL_WORLD_SIZE", "9")]), &["of 9 ranks of this host, of 8"]);
    // Ranks that are dealt out host by host.
    let cyclic = [("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "4")];
    refused(&cyclic, &["consecutively"]);
    let unknown = [("SLURM_PROCID", "2"), ("SLURM_NODEID", "")];
    refused(&with(&SLURM, &unknown), &["neither SLURM_NODEID nor SLURM_GTIDS", "--distribution=block"]);
    refused(&with(&SLURM, &[("SLURM_STEP_TASKS_PER_NODE", "2(x3)")]), &["3 nodes", "6 tasks"]);
    refused(&with(&SLURM, &[("SLURM_STEP_TASKS_PER_NODE", "2(x99999999)")]), &["expected numbers of tasks"]);
    refused(&with(&SLURM, &[("SLURM_NODEID", "9")]), &["SLURM_NODEID=9"]);
}

#[test]
fn several_launchers_must_agree_or_one_is_chosen() {
    let both: Vec<_> = OPEN_MPI.into_iter().chain(HYDRA).collect();
    assert_eq!(read(&both).unwrap().unwrap().launcher, ForeignLauncher::OpenMpi);
    let apart = with(&both, &[("PMI_RANK", "0"), ("MPI_LOCALRANKID", "0")]);
    refused(&apart, &["openmpi", "hydra", "rank 1 of 2", "rank 0 of 2", "PHALANX_LAUNCHER=hydra"]);
    let chosen = read(&with(&apart, &[(CHOICE, "hydra")])).unwrap().unwrap();
    assert_eq!((chosen.launcher, chosen.rank), (ForeignLauncher::Hydra, 0));
    refused(&with(&both, &[(CHOICE, "slurm")]), &["variables of slurm are not set"]);
    refused(&with(&both, &[(CHOICE, "lsf")]), &["PHALANX_LAUNCHER=lsf", "torchrun, openmpi, hydra, slurm"]);
    // srun with PMI: Slurm says more, and says where the hosts meet.
    let pmi = with(&SLURM, &[("PMI_RANK", "3"), ("PMI_SIZE", "5")]);
    assert_eq!(read(&pmi).unwrap().unwrap().launcher, ForeignLauncher::Slurm);
    // mpirun in a shell that srun has started.
    let shell = with(
        &OPEN_MPI,
        &[
            ("SLURM_PROCID", "0"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NTASKS", "1"),
            ("SLURM_STEP_NODELIST", "a"),
            ("SLURM_STEP_TASKS_PER_NODE", "1"),
        ],
    );
    assert_eq!(read(&shell).unwrap().unwrap().launcher, ForeignLauncher::OpenMpi);
}

/// A step of 5 tasks on nodes of 2, 2 and 1, as Slurm numbers them with each distribution: task, local number, node.
#[test]
fn the_tasks_of_a_step_are_numbered_node_by_node_whatever_its_distribution() {
    let cyclic = [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 1, 1)];
    let block = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1), (4, 0, 2)];
    let arbitrary = [(4, 0, 0), (2, 1, 0), (1, 0, 1), (3, 1, 1), (0, 0, 2)];
    for tasks in [cyclic, block, arbitrary] {
        let mut ranks = Vec::new();
        for (task, local, node) in tasks {
            let mut together: Vec<_> = tasks.iter().filter(|(_, _, other)| *other == node).collect();
            together.sort_by_key(|(_, local, _)| *local);
            let together: Vec<String> = together.iter().map(|(task, ..)| task.to_string()).collect();
            let [number, place, node_number] = [task, local, node].map(|number| number.to_string());
            let together = together.join(",");
            let own = [("SLURM_PROCID", &*number), ("SLURM_LOCALID", &place), ("SLURM_NODEID", &node_number)];
            for given in [vec![], vec![("SLURM_GTIDS", &*together)]] {
                let variables: Vec<_> = with(&SLURM, &own).into_iter().chain(given).collect();
                let rank = read(&variables).unwrap().unwrap();
                assert_eq!((rank.number, rank.local_rank, rank.hosts), (task, local, Some((node, 3))));
                assert_eq!((rank.rank, rank.first_of_host()), ([0, 2, 4][node] + local, [0, 2, 4][node]));
                assert_eq!(rank.host().unwrap(), (node, 3));
                ranks.push(rank.rank);
            }
        }
        ranks.sort();
        assert_eq!(ranks, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]);
    }
    // The local number alone follows from the tasks of the node.
    let placed = with(&SLURM, &[("SLURM_LOCALID", ""), ("SLURM_GTIDS", "2,3")]);
    assert_eq!(read(&placed).unwrap().unwrap().local_rank, 1);
    for (wrong, words) in [
        (("SLURM_GTIDS", "2,4"), "SLURM_GTIDS=2,4, but SLURM_PROCID=3 is SLURM_LOCALID=1"),
        (("SLURM_GTIDS", "3"), "of the 2 tasks of node 1"),
        (("SLURM_GTIDS", "2,x"), "expected numbers of tasks"),
        (("SLURM_LOCALID", "2"), "node 1 runs 2 tasks"),
    ] {
        refused(&with(&SLURM, &[wrong]), &[words]);
    }
}

#[test]
fn variables_that_are_not_followed_are_said() {
    let torchrun = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")];
    let [_, world, local, local_world] = torchrun;
    let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "7")];
    let alone = [
        ("SLURM_STEP_NODELIST", "a"),
        ("SLURM_STEP_TASKS_PER_NODE", "1"),
        ("SLURM_STEP_NUM_TASKS", "1"),
        ("SLURM_LOCALID", "0"),
    ];
    let shell: Vec<_> = batch.into_iter().chain(alone).collect();
    let with_mpi: Vec<_> = OPEN_MPI.into_iter().chain([("WORLD_SIZE", "16")]).collect();
    let half: Vec<_> = OPEN_MPI.into_iter().chain([("RANK", "1")]).collect();
    for (variables, is_rank, words) in [
        (&[world][..], false, &["WORLD_SIZE=2 is set, but RANK is not set", "itself"][..]),
        (&[("RANK", ""), world], false, &["RANK is empty"]),
        (&[local_world], false, &["LOCAL_WORLD_SIZE=2"]),
        (&OPEN_MPI[1..], false, &["OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK is not set"]),
        (&HYDRA[1..], false, &["PMI_SIZE=2", "PMI_RANK is not set"]),
        (&[("PMIX_RANK", "3")], false, &["PMIX_RANK=3", "not read"]),
        (&batch, false, &["SLURM_NTASKS=4", "batch script", "srun phalanx train"]),
        (&shell, false, &["SLURM_NTASKS=4", "allocation"]),
        (&with_mpi, true, &["WORLD_SIZE=16", "another launcher are followed"]),
        (&half, true, &["openmpi are followed", "RANK is set", "WORLD_SIZE is not set"]),
    ] {
        let Foreign { rank, notes } = whole(variables).unwrap();
        assert_eq!((rank.is_some(), notes.len()), (is_rank, 1), "{variables:?}: {notes:?}");
        words.iter().for_each(|word| assert!(notes[0].contains(word), "no {word:?} in {notes:?}"));
    }
    for silent in
        [&[][..], &[("WORLD_SIZE", "1"), local], &[("MASTER_PORT", "x")], &torchrun, &OPEN_MPI, &SLURM]
    {
        assert_eq!(whole(silent).unwrap().notes, Vec::<String>::new(), "{silent:?}");
    }
    assert_eq!(read(&torchrun).unwrap().unwrap().said, "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 LOCAL_RANK=0");
}

#[test]
fn variables_that_contradict_those_of_another_launcher_are_refused_though_they_are_incomplete() {
    let both = |more: &[(&'static str, &'static str)]| -> Vec<(&'static str, &'static str)> {
        OPEN_MPI.into_iter().chain(more.iter().copied()).collect()
    };
    refused(
        &both(&[("RANK", "0")]),
        &["openmpi say rank 1 of 2", "torchrun say RANK=0", "PHALANX_LAUNCHER="],
    );
    refused(&both(&[("PMI_RANK", "1"), ("PMI_SIZE", "8")]), &["hydra say PMI_RANK=1 PMI_SIZE=8"]);
    refused(&[("RANK", "3"), ("WORLD_SIZE", "1")], &["rank 3 of 1"]);
    let local =
        both(&[("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "1")]);
    refused(&local, &["1 of 2 on this host", "0 of 1 on this host"]);
    // Open MPI's --map-by node.
    let names = [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ];
    for of in [["2", "4", "1", "2"], ["1", "4", "0", "2"]] {
        let cyclic: Vec<_> = names.into_iter().zip(of).collect();
        assert!(read(&cyclic).and_then(|rank| rank.unwrap().host()).is_err(), "{cyclic:?}");
    }
    // What is assumed gives way to what is known.
    let step: Vec<_> = SLURM.into_iter().chain([("RANK", "3"), ("WORLD_SIZE", "5")]).collect();
    assert_eq!(read(&step).unwrap().unwrap().launcher, ForeignLauncher::Slurm);
}

#[test]
fn the_meeting_point_may_be_given() {
    let at = |address| read(&with(&OPEN_MPI, &[(RENDEZVOUS, address)]));
    assert_eq!(at("node7:4000").unwrap().unwrap().rendezvous, Some(("node7".to_string(), 4000)));
    assert_eq!(at("[fe80::1]:4000").unwrap().unwrap().rendezvous, Some(("fe80::1".to_string(), 4000)));
    for wrong in ["node7", "node7:", "node7:0", ":5", "fe80::1:4000", "a b:5"] {
        assert!(at(wrong).unwrap_err().to_string().contains("PHALANX_RENDEZVOUS="), "{wrong}");
    }
}

#[test]
fn lists_of_nodes_are_expanded() {
    for (list, names) in [
        ("a", "a"),
        ("a,b", "a b"),
        ("node[1-3,7]", "node1 node2 node3 node7"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("r[1-2]n[3,5]x,y", "r1n3x r1n5x r2n3x r2n5x y"),
        ("a[1]", "a1"),
    ] {
        assert_eq!(expand_nodes(list).unwrap().join(" "), names, "{list}");
    }
    for list in
        ["", "a,,b", "a[1", "a]1[", "a[[1]]", "a[3-1]", "a[x-y]", "a[]", "a[1-99999999]", "a[1-300]b[1-300]"]
    {
        assert!(expand_nodes(list).is_err(), "{list}");
    }
    assert!(expand_nodes("a[1-99999999999999999999999]").is_err());
    // Each would take seconds, or hundreds of megabytes.
    let zeros = "0".repeat(1000);
    for (list, words) in [
        (format!("a[1-65536]{}", "b[1]".repeat(100)), "101 brackets"),
        (format!("a[1-65536]{}", "b".repeat(4000)), "253 bytes"),
        (format!("{}[1-65536]", "b".repeat(4000)), "253 bytes"),
        (format!("a[{zeros}1-{zeros}65535]"), "253 bytes"),
    ] {
        let error = expand_nodes(&list).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(expand_nodes(&format!("{}[7]", "b".repeat(252))).unwrap()[0].len(), 253);
}
