//! Disk memory in files: with io_uring and with threads, direct and through the page cache, in one folder and in several,
//! with and without checksums. Many transfers in flight have the effects of the same transfers one after the other.

use std::io::Result;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use phalanx_cpu::Cpu;
use phalanx_plan::trace::{Site, Stream};
use phalanx_tensor::backend::DiskTransfer;
use phalanx_tensor::disk::{BLOCK, DiskStorage, STRIPE, survey};
use phalanx_tensor::operations::Copy;
use phalanx_tensor::{
    Arena, Backend, Category, DType, Device, DiskMemory, DiskOptions, Immediate, Memory, Region, Tensor,
};

/// Elements of the tensor on disk: five stripes and a part of a block.
const ELEMENTS: usize = 5 * STRIPE as usize / 4 + 1000;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

/// A device with disk memory, its backend, and the folders' owner.
struct Rig {
    device: Device,
    backend: Arc<Immediate>,
    disk: Arc<DiskMemory>,
    _folders: Vec<tempfile::TempDir>,
}

fn rig(folders: usize, change: impl Fn(&mut DiskOptions)) -> Rig {
    let folders: Vec<_> = (0..folders).map(|_| tempfile::tempdir().unwrap()).collect();
    let mut options = DiskOptions::new(folders.iter().map(|folder| folder.path().to_path_buf()).collect());
    change(&mut options);
    let disk = DiskMemory::with_options(&options, 8 * STRIPE).unwrap();
    let backend = Arc::new(Immediate::with_disk_stream(Cpu::new(1)).unwrap());
    let host = Arena::unplanned_in(Memory::Host, Region::anonymous(64 << 20).unwrap());
    let device = Device::with_memories(backend.clone(), Arena::heap(), host);
    let device = device.with_disk(Arena::unplanned_on_disk(Arc::clone(&disk)));
    Rig { device, backend, disk, _folders: folders }
}

impl Rig {
    /// Starts a transfer between elements `from..from + length` of `stored` and a host tensor, without a wait.
    fn start(&self, stored: &mut Tensor, host: &mut Tensor, start: usize, writes: bool) {
        let length = host.view().elements();
        let range = start..start + length;
        let copy = match writes {
            true => Copy { from: host.view(), to: stored.view_mut().range(range) },
            false => Copy { from: stored.view().range(range), to: host.view_mut() },
        };
        let (disk, site) = (Arc::clone(&self.disk), Site::caller());
        self.backend.transfer(DiskTransfer { disk, copy, name: "test", site, timer: None });
    }

    fn host(&self, elements: usize) -> Tensor {
        self.device.alloc_host(DType::F32, [elements], Category::Optimizer, "host")
    }

    /// Random reads and writes of one tensor on disk, all in flight together, against the same in memory.
    fn check_order(&self, seed: u64, transfers: usize) {
        let mut random = Random(seed);
        let mut stored = self.device.alloc_disk(DType::F32, [ELEMENTS], Category::Optimizer, "stored");
        let mut expected = vec![0f32; ELEMENTS];
        self.device.write_stored(&expected, &mut stored, 0..ELEMENTS).unwrap();
        let mut reads = Vec::new();
        let mut kept = Vec::new();
        for number in 0..transfers {
            let length = 1 + match random.below(3) {
                0 => random.below(3 * BLOCK / 4),
                1 => random.below(STRIPE as usize / 3),
                _ => 2 * BLOCK - 1,
            };
            let block = BLOCK / 4;
            let start = random.below(ELEMENTS - length);
            let start = if random.below(2) == 0 { start / block * block } else { start };
            let mut host = self.host(length);
            let writes = random.below(2) == 0;
            if writes {
                host.host_slice_mut::<f32>().fill(number as f32);
                expected[start..start + length].fill(number as f32);
            }
            self.start(&mut stored, &mut host, start, writes);
            match writes {
                true => kept.push(host),
                false => reads.push((host, expected[start..start + length].to_vec())),
            }
        }
        self.backend.synchronize(self.backend.record(Stream::Disk)).unwrap();
        for (number, (host, expected)) in reads.iter().enumerate() {
            assert!(host.host_slice::<f32>() == &expected[..], "read {number} of seed {seed}");
        }
        let mut all = vec![0f32; ELEMENTS];
        self.device.read_stored(&stored, 0..ELEMENTS, &mut all).unwrap();
        assert!(all == expected, "seed {seed}");
    }
}

#[test]
fn transfers_in_flight_have_the_effects_of_transfers_in_order() {
    for folders in [1, 3] {
        for (number, io_uring, direct, checksums) in [
            (0, true, true, false),
            (1, true, true, true),
            (2, true, false, false),
            (3, false, true, false),
            (4, false, true, true),
            (5, false, false, true),
        ] {
            let rig = rig(folders, |options| {
                (options.io_uring, options.direct, options.checksums) = (io_uring, direct, checksums);
            });
            rig.check_order(10 * folders as u64 + number, 120);
        }
    }
}

#[test]
fn what_was_asked_for_is_used_where_the_system_has_it() {
    let how = |io_uring, direct| {
        let rig = rig(1, |options| (options.io_uring, options.direct) = (io_uring, direct));
        rig.check_order(0, 4);
        (rig.disk.how().to_string(), rig.disk.registered_bytes())
    };
    assert_eq!(how(false, false), ("threads, through the page cache".to_string(), 0));
    // What the survey of a launcher says to be missing is not there.
    let folder = tempfile::tempdir().unwrap();
    let notes = survey(&DiskOptions::new(vec![folder.path().to_path_buf()]), &[1]).unwrap().notes;
    let missing = |word: &str| notes.iter().any(|note| note.contains(word));
    let (text, registered) = how(true, true);
    assert_eq!(text.contains("io_uring"), !missing("io_uring"), "{text}: {notes:?}");
    assert_eq!(
        text.contains("direct"),
        !missing("tmpfs") && !missing("direct transfers"),
        "{text}: {notes:?}"
    );
    assert!(registered == 0 || text.contains("io_uring"), "{registered}");
}

/// Aligned pieces of memory that an arena has go without a copy; the files have the bytes of the memory, no more.
#[test]
fn chunks_are_striped_over_folders() {
    let rig = rig(2, |_| {});
    let elements = 4 * STRIPE as usize / 4;
    let [mut from, to] = [rig.host(elements), rig.host(elements)];
    let numbers: Vec<f32> = (0..elements).map(|index| index as f32).collect();
    from.host_slice_mut::<f32>().copy_from_slice(&numbers);
    let stored = rig.device.alloc_disk(DType::F32, [elements], Category::Optimizer, "stored");
    let (_, stored) = rig.device.copy_to_disk(from, stored).wait().unwrap();
    let (_, to) = rig.device.copy_from_disk(stored, to).wait().unwrap();
    assert!(to.host_slice::<f32>() == &numbers[..]);
    assert_eq!(rig.disk.bytes(), 8 * STRIPE);
}

/// A storage in memory in which one bit changes when its first block is read for the second time.
struct Rotten {
    bytes: Mutex<(Vec<u8>, usize)>,
}

impl DiskStorage for Rotten {
    fn read_at(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        let mut bytes = self.bytes.lock().unwrap();
        bytes.1 += 1;
        if bytes.1 == 2 {
            bytes.0[5000] ^= 16;
        }
        to.copy_from_slice(&bytes.0[offset as usize..][..to.len()]);
        Ok(to.len())
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<usize> {
        self.bytes.lock().unwrap().0[offset as usize..][..from.len()].copy_from_slice(from);
        Ok(from.len())
    }
}

#[test]
fn a_block_that_has_changed_is_found_by_its_checksum() {
    let bytes = 16 * BLOCK;
    let storage = Rotten { bytes: Mutex::new((vec![0; bytes], 0)) };
    let disk = DiskMemory::over_with_checksums(Box::new(storage), bytes as u64, "the test".to_string());
    let backend = Arc::new(Immediate::with_disk_stream(Cpu::new(1)).unwrap());
    let device = Device::with_memories(backend, Arena::heap(), Arena::heap_of(Memory::Host))
        .with_disk(Arena::unplanned_on_disk(disk));
    let elements = 2 * BLOCK / 4;
    let host = || device.alloc_host(DType::F32, [elements], Category::Optimizer, "host");
    let stored = device.alloc_disk(DType::F32, [elements], Category::Optimizer, "stored");
    let mut from = host();
    from.host_slice_mut::<f32>().fill(2.5);
    let (_, stored) = device.copy_to_disk(from, stored).wait().unwrap();
    let (stored, to) = device.copy_from_disk(stored, host()).wait().unwrap();
    assert_eq!(to.host_slice::<f32>(), vec![2.5; elements]);
    let error = device.copy_from_disk(stored, host()).wait().err().unwrap();
    let words = "the 4096 bytes at offset 4096 of the disk memory of 65536 bytes in the test are not those that were written";
    assert!(error.reason.starts_with(words) && error.call == "copy_from_disk", "{error}");
}

#[test]
fn a_survey_refuses_folders_that_cannot_hold_the_memory_and_notes_what_is_slow() {
    let folder = tempfile::tempdir().unwrap();
    let options = |path: &str| DiskOptions::new(vec![PathBuf::from(path)]);
    let own = folder.path().display().to_string();
    survey(&options(&own), &[1 << 20, 1 << 20]).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing stays");
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let file = file.display().to_string();
    let refused = |path: &str, bytes: &[u64]| survey(&options(path), bytes).unwrap_err().to_string();
    let text = refused(&file, &[5, 6]);
    assert!(text.contains(&file) && text.contains("this is a file; give a folder"), "{text}");
    let text = refused(&format!("{own}/missing"), &[1]);
    assert!(text.contains("missing: ") && text.contains("give a folder that exists"), "{text}");
    // Each rank alone would fit; all together do not.
    let free = phalanx_system::files::free_bytes(folder.path()).unwrap();
    let text = refused(&own, &vec![free / 64; 80]);
    let needed = (free / 64).next_multiple_of(4096) * 80;
    assert!(
        text.contains(&format!("disk memory of {needed} bytes in {own}: {needed} bytes are needed, ")),
        "{text}"
    );
    assert!(text.contains(" are free; free space there"), "{text}");
    // Folders on one disk share its bytes.
    let other = tempfile::tempdir().unwrap();
    let both = DiskOptions::new(vec![folder.path().to_path_buf(), other.path().to_path_buf()]);
    survey(&both, &[free / 64; 80]).unwrap_err();
    let shm = PathBuf::from("/dev/shm");
    if phalanx_system::files::is_in_memory(&shm).unwrap_or(false) {
        let notes = survey(&DiskOptions::new(vec![shm]), &[1]).unwrap().notes;
        assert!(
            notes.iter().any(|note| note.starts_with("/dev/shm is memory, not a disk (tmpfs)")),
            "{notes:?}"
        );
    }
}

/// Lets io_uring fail in this thread, as the profiles of containers do: io_uring_setup returns EPERM.
fn refuse_io_uring() {
    let statement = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        // The number of the system call.
        statement((libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, 0, 0, 0),
        statement(
            (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            0,
            1,
            libc::SYS_io_uring_setup as u32,
        ),
        statement((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        statement((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the call takes numbers alone.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program has the length that it says and lives during the call, which copies it.
    let done = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn where_io_uring_is_refused_threads_transfer_and_the_survey_says_so() {
    let refused = std::thread::spawn(|| {
        refuse_io_uring();
        let rig = rig(1, |_| {});
        rig.check_order(7, 60);
        let folder = tempfile::tempdir().unwrap();
        let options = DiskOptions::new(vec![folder.path().to_path_buf(), std::env::temp_dir()]);
        (rig.disk.how().to_string(), survey(&options, &[1]).unwrap().notes)
    });
    let (how, notes) = refused.join().unwrap();
    assert!(how.starts_with("threads, "), "{how}");
    let said = notes.iter().filter(|note| note.contains("refuses io_uring (Operation not permitted"));
    assert_eq!(said.count(), 1, "{notes:?}");
}
