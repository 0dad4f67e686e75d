//! Choices that a seed decides: the same on every machine.

/// Returns a number that depends on all parts and on nothing else.
pub(super) fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9e37_79b9_7f4a_7c15, |state, part| {
        // The finaliser of SplitMix64.
        let mut mixed = state.wrapping_add(*part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    })
}

/// Returns one of several, which may not be none.
pub(super) fn pick<'a>(texts: &'a [String], parts: &[u64]) -> &'a str {
    let place = mix(parts) % texts.len().max(1) as u64;
    texts.get(place as usize).map_or("", String::as_str)
}

#[cfg(test)]
mod tests {
    use super::{mix, pick};

    #[test]
    fn choices_depend_on_every_part() {
        assert_eq!(mix(&[1, 2]), mix(&[1, 2]));
        assert_ne!(mix(&[1, 2]), mix(&[2, 1]));
        let texts: Vec<String> = ["a", "b", "c"].map(str::to_owned).into();
        let picked: std::collections::BTreeSet<_> =
            (0..50).map(|turn| pick(&texts, &[7, turn])).collect();
        assert_eq!(picked.len(), 3);
    }
}
