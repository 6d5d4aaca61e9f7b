//! The functions of MPI that are used, each with its errors as values: communicators, and messages of bytes.

use std::ffi::c_int;

use mpi::ffi;

use crate::error::MpiError;

/// Tag of all messages: their order in a communicator says what they are.
const TAG: c_int = 0;

/// A communicator. MPI lets any thread use it.
#[derive(Clone, Copy)]
pub struct Communicator(ffi::MPI_Comm);

// SAFETY: a communicator is a handle (a number, or an address that only MPI follows), and MPI was started for calls by
// several threads at once (`job::start`).
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

/// A message in flight, as MPI knows it: a handle of at most 8 bytes.
const _: () = assert!(size_of::<ffi::MPI_Request>() <= size_of::<u64>());

/// The number of a handle.
fn to_id(request: ffi::MPI_Request) -> u64 {
    let mut id = 0;
    // SAFETY: a request is a number or an address of at most 8 bytes (asserted above).
    unsafe { (&raw mut id).cast::<ffi::MPI_Request>().write(request) };
    id
}

/// The handle of a number.
fn to_request(id: u64) -> ffi::MPI_Request {
    // SAFETY: the number was made from a request by `to_id`.
    unsafe { (&raw const id).cast::<ffi::MPI_Request>().read() }
}

/// The result of `call`, which has returned `code`.
fn checked(call: &'static str, code: c_int) -> Result<(), MpiError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length = 0;
    // SAFETY: the text has room for the longest error string and the zero behind it.
    let described = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    let known = described == ffi::MPI_SUCCESS as c_int && length > 0;
    let text = match known {
        true => String::from_utf8_lossy(&text[..(length as usize).min(text.len())]).into_owned(),
        false => format!("error {code}"),
    };
    Err(MpiError::Call { call, text })
}

/// The communicator of all processes, whose errors are returned from now on.
pub fn world() -> Result<Communicator, MpiError> {
    // SAFETY: MPI was started (the caller is `job::start`); both are constants of the library.
    let (world, handler) = unsafe { (ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN) };
    // SAFETY: as above.
    checked("MPI_Comm_set_errhandler", unsafe { ffi::MPI_Comm_set_errhandler(world, handler) })?;
    Ok(Communicator(world))
}

impl Communicator {
    /// This process' number in the communicator, and their number.
    pub fn rank_and_size(self) -> Result<(usize, usize), MpiError> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a communicator of MPI, and numbers to write to.
        checked("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(self.0, &mut rank) })?;
        // SAFETY: as above.
        checked("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(self.0, &mut size) })?;
        Ok((rank.max(0) as usize, size.max(0) as usize))
    }

    /// A communicator of the processes `members` of this one, numbered in this order. All of them call this with the same
    /// tag; it returns when all have.
    pub fn subset(self, members: &[usize], tag: usize) -> Result<Communicator, MpiError> {
        let ranks: Vec<c_int> = members.iter().map(|member| *member as c_int).collect();
        // SAFETY: constants of the library.
        let (mut all, mut some, mut comm) =
            unsafe { (ffi::RSMPI_GROUP_NULL, ffi::RSMPI_GROUP_NULL, ffi::RSMPI_COMM_NULL) };
        // SAFETY: a communicator of MPI, and a group to write to.
        checked("MPI_Comm_group", unsafe { ffi::MPI_Comm_group(self.0, &mut all) })?;
        // SAFETY: as many ranks as are said, of the group that was made above.
        let included = unsafe { ffi::MPI_Group_incl(all, ranks.len() as c_int, ranks.as_ptr(), &mut some) };
        let made = checked("MPI_Group_incl", included).and_then(|()| {
            // SAFETY: the group consists of processes of the communicator.
            let made = unsafe { ffi::MPI_Comm_create_group(self.0, some, tag as c_int, &mut comm) };
            // SAFETY: a group that was made above and is not used any more.
            let freed = unsafe { ffi::MPI_Group_free(&mut some) };
            checked("MPI_Comm_create_group", made).and(checked("MPI_Group_free", freed))
        });
        // SAFETY: as for the other group.
        let freed = unsafe { ffi::MPI_Group_free(&mut all) };
        made.and(checked("MPI_Group_free", freed))?;
        // SAFETY: the communicator that was made above; the handler is a constant of the library.
        let handled = unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) };
        checked("MPI_Comm_set_errhandler", handled)?;
        Ok(Communicator(comm))
    }

    /// Begins to send bytes to process `to`; the number of the message.
    ///
    /// # Safety
    /// The memory is readable and does not change until the message is over, or MPI is not called any more.
    pub unsafe fn send(self, to: usize, from: *const u8, bytes: usize) -> Result<u64, MpiError> {
        // SAFETY: constants of the library.
        let (mut request, byte) = unsafe { (ffi::RSMPI_REQUEST_NULL, ffi::RSMPI_UINT8_T) };
        // SAFETY: the caller keeps the memory; the other arguments are of this communicator.
        let code = unsafe {
            ffi::MPI_Isend(from.cast(), count(bytes), byte, to as c_int, TAG, self.0, &mut request)
        };
        checked("MPI_Isend", code)?;
        Ok(to_id(request))
    }

    /// Begins to receive bytes from process `from`; the number of the message.
    ///
    /// # Safety
    /// The memory is writable, and nobody else uses it until the message is over, or MPI is not called any more.
    pub unsafe fn receive(self, from: usize, to: *mut u8, bytes: usize) -> Result<u64, MpiError> {
        // SAFETY: constants of the library.
        let (mut request, byte) = unsafe { (ffi::RSMPI_REQUEST_NULL, ffi::RSMPI_UINT8_T) };
        // SAFETY: the caller leaves the memory to MPI; the other arguments are of this communicator.
        let code = unsafe {
            ffi::MPI_Irecv(to.cast(), count(bytes), byte, from as c_int, TAG, self.0, &mut request)
        };
        checked("MPI_Irecv", code)?;
        Ok(to_id(request))
    }
}

/// Tests whether the message with this number is complete. Returns None if not, else its number of bytes if it was
/// received.
pub fn test(id: u64) -> Result<Option<usize>, MpiError> {
    let (mut request, mut over, mut bytes) = (to_request(id), 0, 0);
    let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed();
    // SAFETY: a message that was begun and is not over: the caller asks no more when it is. The rest is written to.
    let code = unsafe { ffi::MPI_Test(&mut request, &mut over, status.as_mut_ptr()) };
    checked("MPI_Test", code)?;
    if over == 0 {
        return Ok(None);
    }
    // SAFETY: MPI has written the status of a message that is over; zeros would be one, too.
    let code = unsafe { ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut bytes) };
    checked("MPI_Get_count", code)?;
    Ok(Some(bytes.max(0) as usize))
}

/// A number of bytes as MPI counts.
fn count(bytes: usize) -> c_int {
    c_int::try_from(bytes).expect("long buffers are cut")
}
