//! Counts what a thread has allocated and not freed, so that a test can say how much
//! something holds. What is freed by another thread than the one that allocated it is
//! counted where it happens.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

/// The allocator of the system, with a count.
pub(crate) struct Counting;

fn add(bytes: isize) {
    // A thread that is ending has no count any more.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

fn signed(bytes: usize) -> isize {
    isize::try_from(bytes).unwrap_or(isize::MAX)
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(signed(layout.size()));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(signed(layout.size()));
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        add(-signed(layout.size()));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(signed(size) - signed(layout.size()));
        // SAFETY: as the caller promises.
        unsafe { System.realloc(place, layout, size) }
    }
}

/// Begins to watch this thread.
pub(crate) fn watch() -> Watch {
    let before = HELD.get();
    MOST.set(before);
    Watch { before }
}

/// This thread since it is watched.
pub(crate) struct Watch {
    before: isize,
}

impl Watch {
    /// Returns the most bytes that were held at once, beyond those before.
    pub(crate) fn most(&self) -> usize {
        usize::try_from(MOST.get() - self.before).unwrap_or_default()
    }
}
