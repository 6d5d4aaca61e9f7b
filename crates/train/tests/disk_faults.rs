//! A disk that fails on one of several ranks: all ranks stop and name the rank, the folder and the offset. The last checkpoint
//! stands and resumes.

use crate::rig;
use std::fs::File;
use std::io::{Error, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::rig::assert_same_state;
use phalanx_checkpoint::Checkpoint;
use phalanx_cpu::Cpu;
use phalanx_tensor::disk::DiskStorage;
use phalanx_tensor::{Arena, Device, DeviceFactory, DeviceRequest, DiskMemory, Immediate, Memory, Region};
use phalanx_train::config::Tier;
use phalanx_train::rank::Rank;
use phalanx_train::{RunConfig, RunPlan, on_threads};

/// The rank whose disk fails.
const FAULTY: usize = 1;

/// EIO.
const INPUT_OUTPUT: i32 = 5;

/// A file whose requests fail from one on.
struct Failing {
    file: File,
    left: AtomicU64,
}

impl Failing {
    fn next(&self) -> Result<()> {
        let left = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        left.map(drop).map_err(|_| Error::from_raw_os_error(INPUT_OUTPUT))
    }
}

impl DiskStorage for Failing {
    fn read_at(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        self.next()?;
        DiskStorage::read_at(&self.file, to, offset)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<usize> {
        self.next()?;
        DiskStorage::write_at(&self.file, from, offset)
    }
}

/// Processors of which one has a disk that fails after some requests.
struct Faulty {
    requests: u64,
}

impl DeviceFactory for Faulty {
    fn is_host_addressable(&self) -> bool {
        true
    }

    fn make(&self, request: &DeviceRequest) -> Result<Device> {
        let region = (request.map_shared)(request.device_plan.arena_bytes as usize)?;
        let host = Region::anonymous(request.host_plan.arena_bytes as usize)?;
        let backend = Arc::new(Immediate::with_disk_stream(Cpu::new(1))?);
        let device = Device::with_memories(
            backend,
            Arena::replaying(request.device_plan.clone(), region),
            Arena::replaying_in(Memory::Host, request.host_plan.clone(), host),
        );
        let (bytes, options) = (request.disk_plan.arena_bytes, request.disk.expect("disk memory"));
        let folder = &options.folders[0];
        let disk = match request.index {
            FAULTY => {
                let file = phalanx_system::files::scratch_file(folder, bytes)?;
                let storage = Failing { file, left: AtomicU64::new(self.requests) };
                DiskMemory::over(Box::new(storage), bytes, folder.display().to_string())
            }
            _ => DiskMemory::with_options(options, bytes)?,
        };
        Ok(device.with_disk(Arena::replaying_on_disk(request.disk_plan.clone(), disk)))
    }
}

fn config(folder: &Path) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    (config.parallel.data, config.parallel.zero) = (Some(2), 3);
    (config.memory.optimizer, config.memory.parameters) = (Tier::Nvme, Tier::Nvme);
    config.memory.nvme_path = Some(folder.into());
    config
}

#[test]
fn an_error_of_a_disk_stops_all_ranks_and_the_last_checkpoint_resumes() {
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..6];
    let (folder, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = config(folder.path());
    let save = rig::Checkpoints { save: Some(runs.path().to_path_buf()), ..Default::default() };
    rig::run_between(&model, &config, &steps[..3], &save);
    let saved = runs.path().join("step-3");

    let plan = RunPlan::new(rig::spec(&model, &config)).unwrap();
    let mut stopped = Vec::new();
    for requests in [100, 150, 200] {
        let train = |engine: &mut Rank| {
            let checkpoint = Checkpoint::open(&saved).unwrap();
            if let Err(error) = engine.restore(&checkpoint) {
                return error.to_string();
            }
            let outcome = steps[3..].iter().zip(4..).find_map(|(sequences, number)| {
                engine.step(number, &rig::batch(engine, &config, sequences), false).err()
            });
            outcome.map_or_else(|| "no error".to_string(), |error| error.to_string())
        };
        let errors = on_threads(&Faulty { requests }, &plan, train).unwrap();
        let place = format!(
            "of the disk memory of {} bytes in {}",
            plan.of(FAULTY).disk.arena_bytes,
            folder.path().display()
        );
        for (rank, error) in errors.iter().enumerate() {
            for words in ["failed on the cpu device: cannot ", " bytes at offset ", &place, "(os error 5)"] {
                assert!(error.contains(words), "rank {rank}, {requests} requests: no {words:?} in {error}");
            }
        }
        let told = format!("because of rank {FAULTY}");
        assert!(errors[0].contains(&told), "{requests} requests: {}", errors[0]);
        stopped.push(errors[0].clone());
    }
    stopped.dedup();
    assert!(stopped.len() > 1, "the disk fails at different places: {stopped:?}");

    let whole = rig::run(&model, &config, steps);
    let restore = rig::Checkpoints { restore: Some(saved), ..Default::default() };
    let rest = rig::run_between(&model, &config, &steps[3..], &restore);
    assert_same_state("resumed", &whole.state, &rest.state);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "disk memory leaves no file");
}
