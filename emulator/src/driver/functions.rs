//! Functions by name (`cuGetProcAddress`), and what only this driver has: its reports.

use std::ffi::{CStr, c_char, c_int, c_ulonglong, c_void};

use super::*;

/// All functions with their names.
fn functions() -> impl Iterator<Item = (&'static str, *const ())> {
    let status: [(&str, *const ()); 2] = [
        ("cuGetErrorName", cuGetErrorName as *const ()),
        ("cuGetErrorString", cuGetErrorString as *const ()),
    ];
    let tables = [
        context::table(),
        events::table(),
        graphs::table(),
        host_memory::table(),
        launches::table(),
        memory::table(),
        modules::table(),
        regions::table(),
        streams::table(),
        transfers::table(),
        table(),
    ];
    tables.into_iter().flatten().chain(status)
}

entry_points! {
    /// The function of a name, without or with its version. What is not supported is not found.
    cuGetProcAddress_v2(
        name: *const c_char, out: *mut *const c_void, _version: c_int, _flags: c_ulonglong, found: *mut c_int,
    ) call_early |_driver| {
        if name.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller gives a text with a zero at its end.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Status::INVALID_VALUE)?;
        // The newest version of a function is the one that is here.
        let is_named = |known: &str| {
            let version = known.strip_prefix(name);
            version.is_some_and(|rest| rest.is_empty() || matches!(rest, "_v2" | "_v3"))
        };
        let function = functions().find(|(known, _)| is_named(known));
        if !found.is_null() {
            put(found, if function.is_some() { 0 } else { 1 })?;
        }
        put(out, function.map_or(std::ptr::null(), |(_, function)| function.cast()))?;
        if function.is_some() { Ok(()) } else { Err(Status::NOT_FOUND) }
    }

    /// How many reports there are. A test that finds any has failed.
    phalanxEmulatorReports(out: *mut usize) call_early |driver| { put(out, driver.queues.reports.all().len()) }

    /// How many products cuBLASLt has computed.
    phalanxEmulatorProducts(out: *mut usize) call_early |driver| { put(out, driver.queues.products) }

    /// How many kernels were launched one by one.
    phalanxEmulatorLaunches(out: *mut usize) call_early |driver| { put(out, driver.queues.launches) }

    /// How many graphs were launched.
    phalanxEmulatorGraphLaunches(out: *mut usize) call_early |driver| { put(out, driver.queues.graph_launches) }

    /// How many exchanges with other devices NCCL has ended.
    phalanxEmulatorExchanges(out: *mut usize) call_early |driver| { put(out, driver.queues.exchanges) }

    /// Lets the next captures of so many nodes fail when they are given another one, for tests of programs that capture.
    phalanxEmulatorFailCaptures(captures: usize, nodes: usize) call_early |driver| {
        driver.queues.fail_captures(captures, nodes);
        Ok(())
    }

    /// Writes the text of a report with a zero at its end, cut to the room that there is.
    phalanxEmulatorReport(index: usize, out: *mut c_char, bytes: usize) call_early |driver| {
        let report = driver.queues.reports.all().get(index).ok_or(Status::INVALID_VALUE)?.to_string();
        if bytes == 0 || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let length = report.len().min(bytes - 1);
        // SAFETY: the caller gives room for `bytes`, of which the text and its end use at most as many.
        unsafe {
            out.cast::<u8>().copy_from_nonoverlapping(report.as_ptr(), length);
            out.add(length).write(0);
        }
        Ok(())
    }

    /// Makes the driver new, with settings; all handles end. For tests of sequences in one process.
    phalanxEmulatorReset(seed: c_ulonglong) call_early |driver| {
        let config = Config { seed, ..driver.config };
        *driver = Driver::new(config).ok_or(Status::OUT_OF_MEMORY)?;
        driver.is_initialized = true;
        Ok(())
    }
}
