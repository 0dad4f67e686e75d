//! Blocks of quantised numbers and back to f32. Scale and offset are applied as
//! two roundings (no fused multiply-add), as the recorded numbers were made.

use half::{bf16, f16};

/// Numbers in a quantised block.
const BLOCK: usize = 32;

/// The types of tensor data that can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    F16,
    /// 16-bit floats with the exponent of f32.
    Bf16,
    /// Per block a scale and 4 bits, 8 subtracted.
    Q4_0,
    /// Per block a scale, an offset and 4 bits.
    Q4_1,
    /// Per block a scale and signed bytes.
    Q8_0,
}

impl BlockType {
    /// Every type, with its number in the file.
    pub const ALL: &'static [(u32, Self)] = &[
        (0, Self::F32),
        (1, Self::F16),
        (2, Self::Q4_0),
        (3, Self::Q4_1),
        (8, Self::Q8_0),
        (30, Self::Bf16),
    ];

    /// Returns the type of a number in the file.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == id).map(|&(_, found)| found)
    }

    /// Returns how many numbers a block holds and how many bytes it takes.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (BLOCK, 2 + BLOCK / 2),
            Self::Q4_1 => (BLOCK, 4 + BLOCK / 2),
            Self::Q8_0 => (BLOCK, 2 + BLOCK),
        }
    }

    /// Returns the bytes that so many numbers take, or nothing if they do not
    /// fill whole blocks.
    pub fn bytes(self, numbers: usize) -> Option<usize> {
        let (per_block, bytes) = self.block();
        match numbers.is_multiple_of(per_block) {
            true => (numbers / per_block).checked_mul(bytes),
            false => None,
        }
    }
}

/// Returns ggml's name of a type number, for messages.
pub fn type_name(id: u32) -> String {
    const NAMES: &[&str] = &[
        "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K",
        "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL",
        "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16",
    ];
    match NAMES.get(id as usize) {
        Some(name) => (*name).to_owned(),
        None => format!("type {id}"),
    }
}

/// Turns whole blocks into f32. Bytes beyond the last whole block are ignored:
/// the reader hands over exactly [`BlockType::bytes`].
pub fn dequantise(kind: BlockType, bytes: &[u8]) -> Vec<f32> {
    let (per_block, block_bytes) = kind.block();
    let mut numbers = Vec::with_capacity(bytes.len() / block_bytes * per_block);
    for block in bytes.chunks_exact(block_bytes) {
        match kind {
            BlockType::F32 => {
                numbers.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]]));
            }
            BlockType::F16 => numbers.push(half_at(block, 0)),
            BlockType::Bf16 => numbers.push(bf16::from_le_bytes([block[0], block[1]]).to_f32()),
            BlockType::Q4_0 => {
                let scale = half_at(block, 0);
                let centred = |nibble: u8| (i32::from(nibble) - 8) as f32 * scale;
                numbers.extend(block[2..].iter().map(|byte| centred(byte & 15)));
                numbers.extend(block[2..].iter().map(|byte| centred(byte >> 4)));
            }
            BlockType::Q4_1 => {
                let (scale, offset) = (half_at(block, 0), half_at(block, 2));
                let shifted = |nibble: u8| f32::from(nibble) * scale + offset;
                numbers.extend(block[4..].iter().map(|byte| shifted(byte & 15)));
                numbers.extend(block[4..].iter().map(|byte| shifted(byte >> 4)));
            }
            BlockType::Q8_0 => {
                let scale = half_at(block, 0);
                numbers
                    .extend(block[2..].iter().map(|&byte| f32::from(byte.cast_signed()) * scale));
            }
        }
    }
    numbers
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
