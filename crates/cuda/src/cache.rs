//! Compiled programs on disk, by the hash of everything that makes them: sources, options, and the compiler's version.

use std::path::{Path, PathBuf};

use crate::compiler::{Code, Compiled, Compiler};
use crate::error::Error;
use crate::programs::{HEADERS, Program};

/// Largest file that is read: programs have at most a few hundred KiB.
const MAX_BYTES: u64 = 64 << 20;

/// Cache of compiled programs in a folder.
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// A cache in `folder`, which is made when something is kept.
    pub fn new(folder: &Path) -> Cache {
        Cache { folder: folder.to_path_buf() }
    }

    /// The image of a program: the one that was kept, or a new one, which is kept where the folder can be written.
    ///
    /// # Errors
    /// Those of [`Compiler::compile`].
    pub fn image(
        &self,
        compiler: &Compiler,
        program: &Program,
        architecture: &str,
        code: Code,
    ) -> Result<Vec<u8>, Error> {
        let path = self.folder.join(name_of(compiler.version(), program, architecture, code));
        if let Some(image) =
            phalanx_system::files::read_bounded(&path, MAX_BYTES).ok().and_then(|file| unsealed(&file))
        {
            return Ok(image);
        }
        let Compiled { image, .. } = compiler.compile(program, architecture, code)?;
        // A folder that cannot be written costs the time of compiling again, and stops no run.
        let _ = phalanx_system::files::create_folders(&self.folder)
            .and_then(|_| phalanx_system::files::write(&path, sealed(&image)));
        Ok(image)
    }

    /// Keeps what was compiled elsewhere.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn keep(
        &self,
        version: (i32, i32),
        program: &Program,
        architecture: &str,
        (code, image): (Code, &[u8]),
    ) -> std::io::Result<()> {
        phalanx_system::files::create_folders(&self.folder)?;
        phalanx_system::files::write(
            &self.folder.join(name_of(version, program, architecture, code)),
            sealed(image),
        )
    }
}

/// The image behind its own hash, so that a damaged file is compiled again.
fn sealed(image: &[u8]) -> Vec<u8> {
    [blake3::hash(image).as_bytes().as_slice(), image].concat()
}

/// The image of a sealed file; None for a damaged one.
fn unsealed(file: &[u8]) -> Option<Vec<u8>> {
    let (hash, image) = file.split_at_checked(blake3::OUT_LEN)?;
    (blake3::hash(image).as_bytes() == hash).then(|| image.to_vec())
}

/// The name of a program's file.
fn name_of(version: (i32, i32), program: &Program, architecture: &str, code: Code) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    let (name, text) = program.source.file();
    [name, text].into_iter().for_each(&mut add);
    HEADERS.iter().flat_map(|(name, text)| [name, text]).for_each(|text| add(text));
    Compiler::options(program, architecture).iter().for_each(|option| add(option));
    add(&format!("{}.{}", version.0, version.1));
    let extension = match code {
        Code::Cubin => "cubin",
        Code::Ptx => "ptx",
    };
    let name = name.trim_end_matches(".cu");
    format!("{name}-{architecture}-{}.{extension}", &hasher.finalize().to_hex()[..32])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::Source;
    use phalanx_plan::trace::DType;

    #[test]
    fn everything_that_makes_a_program_is_in_its_name() {
        let program = Program::of(Source::Bias, DType::BF16);
        let name =
            |program: &Program, version, architecture, code| name_of(version, program, architecture, code);
        let names = [
            name(&program, (12, 9), "sm_90", Code::Cubin),
            name(&program, (13, 0), "sm_90", Code::Cubin),
            name(&program, (12, 9), "sm_80", Code::Cubin),
            name(&program, (12, 9), "sm_90", Code::Ptx),
            name(&program.with_other(DType::F32), (12, 9), "sm_90", Code::Cubin),
            name(&Program::of(Source::Bias, DType::F16), (12, 9), "sm_90", Code::Cubin),
            name(&Program::of(Source::Gelu, DType::BF16), (12, 9), "sm_90", Code::Cubin),
        ];
        for (i, one) in names.iter().enumerate() {
            assert!(names[..i].iter().all(|other| other != one), "{one}");
        }
        assert_eq!(names[0], name(&program, (12, 9), "sm_90", Code::Cubin));
    }

    #[test]
    fn what_was_kept_is_found_under_its_name() {
        let folder = std::env::temp_dir().join(format!("phalanx-cuda-cache-{}", std::process::id()));
        let (program, cache) = (Program::of(Source::Bias, DType::BF16), Cache::new(&folder));
        cache.keep((12, 9), &program, "sm_80", (Code::Ptx, b"text")).unwrap();
        let name = name_of((12, 9), &program, "sm_80", Code::Ptx);
        let kept = phalanx_system::files::read_bounded(&folder.join(name), MAX_BYTES).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(unsealed(&kept).as_deref(), Some(&b"text"[..]));
    }

    #[test]
    fn a_damaged_file_is_not_used() {
        let file = sealed(b"image");
        assert_eq!(unsealed(&file).as_deref(), Some(&b"image"[..]));
        for at in 0..file.len() {
            let mut damaged = file.clone();
            damaged[at] ^= 1;
            assert_eq!(unsealed(&damaged), None, "byte {at}");
        }
        assert_eq!(unsealed(&file[..file.len() - 1]), None);
        assert_eq!(unsealed(&file[..5]), None);
    }
}
