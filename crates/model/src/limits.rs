//! Limits that the system sets for a process, as errors with an exit code instead of deaths by signal.
//!
//! An allocation that fails aborts a Rust program (SIGABRT), and a write beyond RLIMIT_FSIZE kills it (SIGXFSZ).
//! A program that declares [`Allocator`] and calls [`become_errors`] exits with code 4 and a message in the first
//! case, and gets EFBIG from the write in the second. Both affect the whole process, so programs do it, not libraries.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes of the last allocation of this thread that failed. Constant and without a destructor: usable at any time.
    static REFUSED: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which notes the size of an allocation that fails. Whoever asks with `try_reserve` gets an
/// error as usual; everyone else aborts, and then the note tells why.
pub struct Allocator;

fn noted(pointer: *mut u8, bytes: usize) -> *mut u8 {
    if pointer.is_null() {
        REFUSED.set(bytes);
    }
    pointer
}

// SAFETY: all calls are passed on to the system's allocator with their arguments, and its pointers are returned.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract is that of the system's allocator; so below.
        noted(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        noted(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: as above.
        noted(unsafe { System.realloc(pointer, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Makes a failed allocation exit code 4, and a file beyond the allowed size an error of the write. No effect unless
/// the system is Linux with glibc.
pub fn become_errors() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `at_abort` calls only functions that may be called in a signal handler.
    unsafe {
        libc::signal(libc::SIGABRT, at_abort as extern "C" fn(libc::c_int) as libc::sighandler_t);
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// Ends the process with a message if a failed allocation is the reason of the abort; otherwise the process aborts.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
extern "C" fn at_abort(_signal: libc::c_int) {
    let bytes = REFUSED.get();
    if bytes == 0 {
        return;
    }
    let mut buffer = [0; 160];
    let message = refusal(bytes, &mut buffer);
    // SAFETY: the pointer and the length are those of a slice; `_exit` runs no destructor and no handler.
    unsafe {
        libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
        libc::_exit(4);
    }
}

/// Writes the message into `buffer`, because nothing can be allocated any more.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn refusal(bytes: usize, buffer: &mut [u8]) -> &[u8] {
    use std::io::Write;
    let room = buffer.len();
    let mut rest = &mut *buffer;
    let text = "ballast: not enough memory: the system refused an allocation of";
    let _ = writeln!(rest, "{text} {bytes} bytes; free memory or raise its limit (ulimit -v)");
    let used = room - rest.len();
    &buffer[..used]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_allocation_is_noted_and_others_are_those_of_the_system() {
        let huge = Layout::from_size_align(isize::MAX as usize - 4095, 1).unwrap();
        let small = Layout::from_size_align(64, 16).unwrap();
        // SAFETY: layouts are not empty, every pointer is freed once with the layout it then has, and reads are
        // within it.
        unsafe {
            assert!(Allocator.alloc(huge).is_null() && Allocator.alloc_zeroed(huge).is_null());
            assert_eq!(REFUSED.get(), huge.size());
            let zeros = Allocator.alloc_zeroed(small);
            assert!((0..64).all(|i| *zeros.add(i) == 0));
            zeros.add(3).write(7);
            let grown = Allocator.realloc(zeros, small, 4096);
            assert_eq!(*grown.add(3), 7);
            let grown_layout = Layout::from_size_align(4096, 16).unwrap();
            assert!(Allocator.realloc(grown, grown_layout, huge.size()).is_null());
            Allocator.dealloc(grown, grown_layout);
            Allocator.dealloc(Allocator.alloc(small), small);
        }
    }

    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[test]
    fn the_message_of_a_failed_allocation_fits_without_memory() {
        let mut buffer = [0; 160];
        let message = String::from_utf8(refusal(usize::MAX, &mut buffer).to_vec()).unwrap();
        assert!(
            message.contains("18446744073709551615 bytes;") && message.ends_with("(ulimit -v)\n"),
            "{message}"
        );
    }
}
