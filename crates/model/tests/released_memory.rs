//! Memory that is returned to the system. The only test of its process, because it measures the process.

use ballast_model::memory;

#[test]
fn released_pages_are_no_longer_resident_and_can_be_used_again() {
    memory::keep_freed();
    let blocks: Vec<Vec<u8>> = (0..40).map(|_| vec![7u8; 1 << 20]).collect();
    // A block after them keeps the freed ones inside the heap.
    let after = vec![7u8; 1 << 10];
    drop(blocks);
    let kept = memory::current();
    memory::release_freed();
    if cfg!(all(target_os = "linux", target_env = "gnu")) {
        let (kept, now) = (kept.unwrap(), memory::current().unwrap());
        assert!(now + (32 << 20) < kept, "{kept} bytes before, {now} after");
    }
    let again = vec![0u8; 1 << 20];
    assert!(again.iter().all(|byte| *byte == 0) && after.iter().all(|byte| *byte == 7));
}
