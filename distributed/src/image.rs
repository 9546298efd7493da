//! Memory of a rank's kernel, as the host writes it before a launch.

use crate::memory::HugeBuffer;
use std::ptr::NonNull;

/// Bytes that the host writes, and the address at which the kernel finds them. On the CPU target that is their own address; on a
/// GPU it is an address in device memory, to which they are copied.
pub(crate) struct Image {
    start: NonNull<u8>,
    len: usize,
    base: u64,
    _owner: Box<dyn Send + Sync>,
}

// SAFETY: the image owns its bytes. They are shared through raw pointers, and the users of these order the accesses.
unsafe impl Send for Image {}
// SAFETY: as above; writing needs `&mut self`.
unsafe impl Sync for Image {}

impl Image {
    /// Zeroed bytes that the kernel uses in place.
    pub fn in_place(buffer: HugeBuffer) -> Image {
        let base = buffer.as_ptr() as u64;
        Image::at(buffer, base)
    }

    /// Zeroed bytes that will be copied to `base`.
    pub fn at(buffer: HugeBuffer, base: u64) -> Image {
        let start = buffer.as_ptr();
        let len = buffer.len();
        // SAFETY: `start` is the first of `len` zeroed bytes, which `buffer` owns and does not move.
        unsafe { Image::of(start, len, base, Box::new(buffer)) }
    }

    /// `len` bytes at `start` that the kernel sees at `base`.
    ///
    /// # Safety
    /// `start` is not null, the bytes are zeroed, and they stay at that place as long as `owner` lives.
    pub unsafe fn of(start: *mut u8, len: usize, base: u64, owner: Box<dyn Send + Sync>) -> Image {
        // SAFETY: not null, as the caller guarantees.
        let start = unsafe { NonNull::new_unchecked(start) };
        Image { start, len, base, _owner: owner }
    }

    /// The kernel's address of the byte at `offset`.
    pub fn address(&self, offset: u64) -> u64 {
        self.base + offset
    }

    /// The host's address of `count` values at `offset`.
    ///
    /// # Panics
    /// The values are outside the image, or not aligned.
    pub fn host<T>(&self, offset: u64, count: usize) -> *mut T {
        let bytes = count.checked_mul(size_of::<T>());
        let end = bytes.and_then(|bytes| (offset as usize).checked_add(bytes));
        assert!(end.is_some_and(|end| end <= self.len), "{offset} + {count} values of {}", self.len);
        // SAFETY: the offset is inside the bytes, as checked.
        let place = unsafe { self.start.as_ptr().add(offset as usize) }.cast::<T>();
        assert!(place.is_aligned());
        place
    }

    /// Writes `values` at `offset`.
    ///
    /// # Panics
    /// Those of [`Image::host`].
    pub fn put<T: Copy>(&mut self, offset: u64, values: &[T]) {
        let place = self.host::<T>(offset, values.len());
        // SAFETY: `place` has room for the values, and `&mut self` excludes other users.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), place, values.len()) };
    }

    /// The first byte, as the host sees it.
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_here_and_named_where_the_kernel_sees_them() {
        let buffer = HugeBuffer::new(0, "a test", 100).unwrap();
        let mut image = Image::at(buffer, 0x7000_0000);
        image.put(8, &[1u32, 2, 3]);
        assert_eq!(image.address(8), 0x7000_0008);
        // SAFETY: written above, no other reference exists.
        assert_eq!(unsafe { std::slice::from_raw_parts(image.host::<u32>(4, 4), 4) }, [0, 1, 2, 3]);
        let own = Image::in_place(HugeBuffer::new(0, "a test", 8).unwrap());
        assert_eq!(own.address(4), own.as_ptr() as u64 + 4);
    }

    #[test]
    #[should_panic(expected = "values of 100")]
    fn values_outside_the_image_are_refused() {
        Image::at(HugeBuffer::new(0, "a test", 100).unwrap(), 0).put(96, &[1u32, 2]);
    }
}
