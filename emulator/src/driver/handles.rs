//! Handles of the driver's objects: numbers that are never used twice.

use std::collections::HashMap;

use super::Status;

/// Objects by handle.
pub struct Handles<T> {
    objects: HashMap<usize, T>,
    next: usize,
}

impl<T> Handles<T> {
    /// Handles from a number on.
    pub fn new(first: usize) -> Self {
        Self { objects: HashMap::new(), next: first }
    }

    /// A handle for an object.
    pub fn add(&mut self, object: T) -> usize {
        let handle = self.next;
        self.next += 16;
        self.objects.insert(handle, object);
        handle
    }

    /// The object of a handle.
    ///
    /// # Errors
    /// If there is none, such as after its end.
    pub fn get(&self, handle: usize) -> Result<&T, Status> {
        self.objects.get(&handle).ok_or(Status::INVALID_HANDLE)
    }

    /// The object of a handle, to change it.
    ///
    /// # Errors
    /// If there is none.
    pub fn get_mut(&mut self, handle: usize) -> Result<&mut T, Status> {
        self.objects.get_mut(&handle).ok_or(Status::INVALID_HANDLE)
    }

    /// Ends a handle.
    ///
    /// # Errors
    /// If there is no object, such as after its end.
    pub fn remove(&mut self, handle: usize) -> Result<T, Status> {
        self.objects.remove(&handle).ok_or(Status::INVALID_HANDLE)
    }

    /// Objects with their handles.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.objects.iter().map(|(handle, object)| (*handle, object))
    }
}
