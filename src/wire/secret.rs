//! Keys are kept as digests and compared in one way only.

/// Compares two digests of keys in a time that does not depend on where they
/// differ. No key is compared in any other way.
pub fn equal_in_constant_time(known: &[u8; 32], given: &[u8; 32]) -> bool {
    let difference = known.iter().zip(given).fold(0, |sum, (a, b)| sum | (a ^ b));
    std::hint::black_box(difference) == 0
}
