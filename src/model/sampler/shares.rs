//! What each token of a vocabulary is worth: the exponentials of a softmax.
//!
//! They take most of the time of sampling, so all is written for vector registers: no
//! branches, several sums side by side. The sums themselves are in f64.

/// Tokens whose shares are added up together.
const BLOCK: usize = 512;
/// Sums, or largest numbers, side by side.
const LANES: usize = 16;

/// Softmax of logits divided by a temperature: what log-probs need of it.
#[derive(Clone, Copy)]
pub(super) struct LogSum {
    temperature: f64,
    /// Logarithm of the sum of exponentials.
    value: f64,
}

impl LogSum {
    /// Computes it; the largest logit is known.
    pub(super) fn of(logits: &[f32], temperature: f32, largest: f32) -> Self {
        let mut room = [0.0; BLOCK];
        let blocks = logits.chunks(BLOCK);
        let sums =
            blocks.map(|logits| fill(logits, (temperature, largest), &mut room[..logits.len()]));
        Self::new(sums.sum(), temperature, largest)
    }

    fn new(sum: f64, temperature: f32, largest: f32) -> Self {
        let temperature = f64::from(temperature);
        Self { temperature, value: f64::from(largest) / temperature + sum.ln() }
    }

    pub(super) fn log_prob(&self, logit: f32) -> f32 {
        (f64::from(logit) / self.temperature - self.value) as f32
    }
}

/// The shares of all tokens; the likeliest has 1.
#[derive(Debug, Clone, Default)]
pub(super) struct Shares {
    all: Vec<f32>,
    /// Sum of each block.
    sums: Vec<f64>,
}

impl Shares {
    /// Computes them and their softmax; the largest logit is known.
    pub(super) fn set(&mut self, logits: &[f32], temperature: f32, largest: f32) -> LogSum {
        self.all.resize(logits.len(), 0.0);
        self.sums.clear();
        for (logits, shares) in logits.chunks(BLOCK).zip(self.all.chunks_mut(BLOCK)) {
            self.sums.push(fill(logits, (temperature, largest), shares));
        }
        LogSum::new(self.total(), temperature, largest)
    }

    pub(super) fn all(&self) -> &[f32] {
        &self.all
    }

    pub(super) fn total(&self) -> f64 {
        self.sums.iter().sum()
    }

    /// Returns the token at a place between 0 and 1, if all lie side by side.
    pub(super) fn at(&self, place: f64) -> usize {
        let mut mark = place * self.total();
        // Rounding may leave the mark beyond the end: then it is in the last block that
        // has any share.
        let last = self.sums.iter().rposition(|sum| *sum > 0.0).unwrap_or(0);
        let mut block = 0;
        while block < last && mark >= self.sums[block] {
            mark -= self.sums[block];
            block += 1;
        }
        let start = block * BLOCK;
        let shares = self.all.iter().enumerate().skip(start).take(BLOCK);
        super::walk(shares.map(|(id, share)| (id, f64::from(*share))), mark)
    }
}

/// Puts the shares of some logits into their places; returns the sum.
fn fill(logits: &[f32], (temperature, largest): (f32, f32), shares: &mut [f32]) -> f64 {
    for (share, logit) in shares.iter_mut().zip(logits) {
        *share = exp((logit - largest) / temperature);
    }
    let mut sums = [0.0_f64; LANES];
    for part in shares.chunks(LANES) {
        for (sum, share) in sums.iter_mut().zip(part) {
            *sum += f64::from(*share);
        }
    }
    sums.iter().sum()
}

/// Returns e^x for x up to 0, to 3 units in the last place; 0 where f32 has no full
/// precision left.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Added to a small number, it leaves the nearest whole one in the last bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, of which the first has few bits: its multiples are exact.
    const HIGH: f32 = 355.0 / 512.0;
    const LOW: f32 = (std::f64::consts::LN_2 - 355.0 / 512.0) as f32;
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let twos = rounded - ROUND;
    let rest = (x - twos * HIGH) - twos * LOW;
    let mut sum: f32 = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum * rest + coefficient;
    }
    // The whole number goes to where the exponent is.
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    if x < -87.0 { 0.0 } else { sum * power }
}

/// Returns the largest of some numbers; if one is NaN, any.
pub(super) fn largest(numbers: &[f32]) -> f32 {
    let mut most = [f32::NEG_INFINITY; LANES];
    for part in numbers.chunks(LANES) {
        for (most, number) in most.iter_mut().zip(part) {
            *most = if *number > *most { *number } else { *most };
        }
    }
    most.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// Whether no number is infinite or NaN. Looks at all of them: to stop early would be slower.
pub(super) fn all_finite(numbers: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    let odd = |number: &f32| u32::from(number.to_bits() & EXPONENT == EXPONENT);
    numbers.iter().fold(0, |found, number| found | odd(number)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers from 0 down, in no order.
    fn logits(count: usize, least: f32) -> Vec<f32> {
        (0..count).map(|at| least * ((at * 7919) % count) as f32 / count as f32).collect()
    }

    #[test]
    fn an_exponential_is_that_of_f64() {
        assert_eq!((exp(0.0), exp(-87.1), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        for x in logits(100_003, -86.9) {
            let wanted = f64::from(x).exp();
            let off = (f64::from(exp(x)) - wanted).abs() / wanted;
            assert!(off < 4e-7, "{x}: {off:e}");
        }
    }

    #[test]
    fn a_softmax_is_that_of_f64() {
        for (temperature, least) in [(1.0, -30.0), (0.3, -20.0), (5.0, -40.0)] {
            // Not a multiple of a block, nor of the lanes.
            let logits = logits(49_153, least);
            let exact: f64 =
                logits.iter().map(|logit| (f64::from(*logit) / f64::from(temperature)).exp()).sum();
            let mut shares = Shares::default();
            let both =
                [LogSum::of(&logits, temperature, 0.0), shares.set(&logits, temperature, 0.0)];
            for found in both {
                assert!((found.value - exact.ln()).abs() < 3e-7, "{temperature}: {}", found.value);
            }
            assert_eq!(shares.all().len(), 49_153);
        }
    }

    #[test]
    fn a_place_is_the_token_it_falls_on_whatever_the_block() {
        let mut shares = Shares::default();
        // All alike: token i has the places from i / count on.
        let count = 3 * BLOCK + 5;
        let same = |number: f32| std::iter::repeat_n(number, count).collect::<Vec<_>>();
        shares.set(&same(2.0), 0.7, 2.0);
        for id in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 7, count - 1] {
            assert_eq!(shares.at((id as f64 + 0.5) / count as f64), id);
        }
        assert_eq!(shares.at(1.0), count - 1, "rounding may go so far");
        // Tokens without a share are never met.
        let mut few = same(-1e4);
        (few[BLOCK + 3], few[2 * BLOCK]) = (0.0, 0.0);
        shares.set(&few, 1.0, 0.0);
        let met: Vec<_> = [0.0, 0.49, 0.51, 1.0].map(|place| shares.at(place)).to_vec();
        assert_eq!(met, [BLOCK + 3, BLOCK + 3, 2 * BLOCK, 2 * BLOCK]);
    }

    #[test]
    fn the_largest_number_and_odd_ones_are_found_anywhere() {
        for place in [0, 15, 16, 99] {
            let mut numbers = [-3.0; 100];
            numbers[place] = -1.0;
            assert_eq!((largest(&numbers), all_finite(&numbers)), (-1.0, true));
            for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                numbers[place] = odd;
                assert!(!all_finite(&numbers));
            }
        }
    }
}
