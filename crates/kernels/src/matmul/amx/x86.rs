//! Packing, and products of tiles in registers, on x86-64 with Linux.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::transmute;
use std::ops::Range;

use half::bf16;

use super::super::bf16::transposed;
use super::{AMX_STRIP as BLOCK, K, PARTS, SIDE, STEP, Side, TILE, Target, Tile, depth};
use crate::Element;

/// Sixteen rows of 64 bytes in each of the eight tile registers, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const CONFIGURATION: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// C (+)= by A B, block after block of the inner index, and in each strip after strip of rows; only an f32 A
/// has a factor other than 1. Tiles are configured for the call alone: other libraries of the process
/// configure theirs, and a thread without tiles is cheaper to suspend.
///
/// # Safety
/// The tile is valid for reading and writing and used by the caller alone; the machine has the
/// instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn blocks<A: Element, B: Element, const A_PARTS: usize, const B_PARTS: usize>(
    to: Target,
    by: f32,
    a: Side<'_, A>,
    b: Side<'_, B>,
    k: usize,
    panels: &mut [f32],
    done: &mut dyn FnMut(Range<usize>),
) {
    let panels = bytemuck::cast_slice_mut::<f32, u32>(panels);
    let skipped = panels.as_ptr().align_offset(64).min(super::ALIGN);
    let panels = &mut panels[skipped..];
    let (a_panel, b_panel) = panels.split_at_mut(BLOCK * PARTS * K / 2);
    let Target { tile, m, add } = to;
    let depth = depth(B_PARTS, tile.n);
    let depth_of_a = if A_PARTS == 1 { depth } else { K };
    // SAFETY: the machine has the instruction, and the configuration is valid.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIGURATION, options(nostack, readonly, preserves_flags)) };
    for first in (0..k).step_by(depth) {
        let block = first..k.min(first + depth);
        let steps = block.len().div_ceil(STEP);
        // All steps of a strip of columns at once. A B that is stored by rows and passes through the cache is
        // read row by row, all columns of a step at once.
        let at_once = if b.outer_first || k <= depth { depth } else { STEP };
        for l in block.clone().step_by(at_once) {
            for j in (0..tile.n).step_by(BLOCK) {
                let step = j / BLOCK * steps + (l - first) / STEP;
                let (columns, inner) = (j..tile.n.min(j + BLOCK), l..block.end.min(l + at_once));
                pack::<B, false, B_PARTS>(&mut b_panel[step * B_PARTS * 2 * TILE..], 1.0, b, columns, inner);
            }
        }
        for i in (0..m).step_by(BLOCK) {
            let rows = i..m.min(i + BLOCK);
            // The row of C that has the first sums of the strip.
            let place = if tile.m < m { 0 } else { i };
            for l in block.clone().step_by(depth_of_a) {
                let inner = l..block.end.min(l + depth_of_a);
                pack::<A, true, A_PARTS>(a_panel, by, a, rows.clone(), inner.clone());
                for j in (0..tile.n).step_by(BLOCK) {
                    let step = j / BLOCK * steps + (l - first) / STEP;
                    let columns = &b_panel[step * B_PARTS * 2 * TILE..];
                    // SAFETY: the row and column are inside the tile, and the panels hold the steps of both;
                    // the rest is the caller's guarantee.
                    unsafe {
                        let part = Tile {
                            c: tile.c.add(place * tile.row_stride + j),
                            m: rows.len(),
                            n: BLOCK.min(tile.n - j),
                            ..tile
                        };
                        let steps = inner.len().div_ceil(STEP);
                        sums::<A_PARTS, B_PARTS>(part, add || l > 0, a_panel, columns, steps);
                    }
                }
            }
            if block.end == k {
                done(rows);
            }
        }
    }
    // SAFETY: the machine has the instruction; no tile is used after it.
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
}

/// Two tiles side by side of every part of every step, for up to 32 rows of A (`BY_OUTER`) or columns of B.
/// Elements outside are zero.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pack<T: Element, const BY_OUTER: bool, const PARTS: usize>(
    panel: &mut [u32],
    by: f32,
    side: Side<'_, T>,
    outer: Range<usize>,
    inner: Range<usize>,
) {
    for (l, step) in inner.clone().step_by(STEP).zip(panel.chunks_exact_mut(PARTS * 2 * TILE)) {
        let inner = l..inner.end.min(l + STEP);
        if let Some(data) = T::as_bf16(side.data).filter(|_| outer.len() == BLOCK && inner.len() == STEP) {
            whole_tiles::<BY_OUTER>(step, data, side.stride, side.outer_first, outer.start, l);
            continue;
        }
        for (o, first) in outer.clone().step_by(SIDE).zip([0, TILE]) {
            let outer = o..outer.end.min(o + SIDE);
            for (part, lines) in lines::<T, PARTS>(by, side, outer, inner.clone()).into_iter().enumerate() {
                let lines = if side.outer_first == BY_OUTER { lines } else { transposed(lines) };
                let (target, _) = step[part * 2 * TILE + first..][..TILE].as_chunks_mut::<SIDE>();
                for (target, line) in target.iter_mut().zip(lines) {
                    // SAFETY: sixteen elements.
                    unsafe { _mm512_storeu_si512(target.as_mut_ptr().cast(), line) };
                }
            }
        }
    }
}

/// Two whole tiles of bf16 as they are stored: 32 rows of A (`BY_OUTER`) or columns of B from `outer` on, and 32
/// inner elements from `inner` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn whole_tiles<const BY_OUTER: bool>(
    step: &mut [u32],
    data: &[bf16],
    stride: usize,
    outer_first: bool,
    outer: usize,
    inner: usize,
) {
    // Loops and no closures that others call: those would not have the instructions.
    let mut tiles = [[_mm512_setzero_si512(); SIDE]; 2];
    for at in 0..SIDE {
        if outer_first {
            tiles[0][at] = line(data, (outer + at) * stride + inner);
            tiles[1][at] = line(data, (outer + SIDE + at) * stride + inner);
        } else {
            let even = line(data, (inner + 2 * at) * stride + outer);
            let odd = line(data, (inner + 2 * at + 1) * stride + outer);
            for (tile, order) in tiles.iter_mut().zip(&PAIRS) {
                // SAFETY: the order has 32 words.
                let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
                tile[at] = _mm512_permutex2var_epi16(even, order, odd);
            }
        }
    }
    for (target, lines) in step.chunks_exact_mut(TILE).zip(tiles) {
        let lines = if outer_first == BY_OUTER { lines } else { transposed(lines) };
        for (target, line) in target.chunks_exact_mut(SIDE).zip(lines) {
            // SAFETY: sixteen elements.
            unsafe { _mm512_storeu_si512(target.as_mut_ptr().cast(), line) };
        }
    }
}

/// Loads 32 elements.
#[inline]
#[target_feature(enable = "avx512f")]
fn line(data: &[bf16], first: usize) -> __m512i {
    let words = &data[first..][..STEP];
    // SAFETY: 32 words.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

/// Words of two lines, the second from 32 on, as pairs: of the lower halves, and of the upper.
const PAIRS: [[u16; 32]; 2] = {
    let (mut order, mut i) = ([[0; 32]; 2], 0);
    while i < 32 {
        order[0][i] = (i / 2 + i % 2 * 32) as u16;
        order[1][i] = order[0][i] + 16;
        i += 1;
    }
    order
};

/// Parts of up to 16 x 32 elements, times `by`: a line has the 16 pairs of an outer index if that is stored
/// first, else the 16 outer indices of a pair.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn lines<T: Element, const PARTS: usize>(
    by: f32,
    side: Side<'_, T>,
    outer: Range<usize>,
    inner: Range<usize>,
) -> [[__m512i; SIDE]; PARTS] {
    let mut lines = [[_mm512_setzero_si512(); SIDE]; PARTS];
    let row = |first: usize, columns: Range<usize>| &side.data[first * side.stride..][columns];
    let count = if side.outer_first { outer.len() } else { inner.len().div_ceil(2) };
    for at in 0..count {
        // The elements of a line, in two halves: of one row, or of the two rows of a pair.
        let (low, high) = if side.outer_first {
            let row = row(outer.start + at, inner.clone());
            row.split_at(row.len().min(SIDE))
        } else {
            let l = inner.start + 2 * at;
            let odd = if l + 1 < inner.end { row(l + 1, outer.clone()) } else { &[] };
            (row(l, outer.clone()), odd)
        };
        let halves = match (T::as_bf16(low), T::as_bf16(high)) {
            (Some(low), Some(high)) => [side_by_side(words(low), words(high)); PARTS],
            _ => {
                let wide = |half: &[T]| {
                    _mm512_mul_ps(floats(T::as_f32(half).expect("f32 or bf16")), _mm512_set1_ps(by))
                };
                split::<PARTS>(wide(low), wide(high))
            }
        };
        for (lines, halves) in lines.iter_mut().zip(halves) {
            lines[at] = if side.outer_first { halves } else { alternating(halves) };
        }
    }
    lines
}

/// Loads up to 16 elements; the rest are zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn words(half: &[bf16]) -> __m256i {
    let mask = (1u32 << half.len().min(SIDE)) - 1;
    // SAFETY: the mask has the lanes that are in the slice.
    unsafe { _mm512_castsi512_si256(_mm512_maskz_loadu_epi16(mask, half.as_ptr().cast())) }
}

/// Loads up to 16 elements; the rest are zeros.
#[inline]
#[target_feature(enable = "avx512f")]
fn floats(half: &[f32]) -> __m512 {
    let mask = ((1u32 << half.len().min(SIDE)) - 1) as u16;
    // SAFETY: the mask has the lanes that are in the slice.
    unsafe { _mm512_maskz_loadu_ps(mask, half.as_ptr()) }
}

/// Sixteen words, then sixteen others.
#[inline]
#[target_feature(enable = "avx512f")]
fn side_by_side(low: __m256i, high: __m256i) -> __m512i {
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}

/// Pairs of a word of the lower half and one of the upper.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn alternating(halves: __m512i) -> __m512i {
    const ORDER: [u16; 32] = {
        let (mut order, mut i) = ([0; 32], 0);
        while i < 32 {
            order[i] = (i / 2 + i % 2 * 16) as u16;
            i += 1;
        }
        order
    };
    // SAFETY: the order has 32 words.
    let order = unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) };
    _mm512_permutexvar_epi16(order, halves)
}

/// The bf16 whose sum is an f32, or the first of them; `low` and `high` side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn split<const PARTS: usize>(mut low: __m512, mut high: __m512) -> [__m512i; PARTS] {
    let mut parts = [_mm512_setzero_si512(); PARTS];
    // The instruction rounds values from here on to infinity, or has nothing to round.
    let limit = _mm512_set1_epi32(0x7f00_0000);
    let size = |x: __m512| _mm512_castps_si512(_mm512_abs_ps(x));
    let usual = _mm512_cmplt_epi32_mask(size(low), limit) & _mm512_cmplt_epi32_mask(size(high), limit);
    for part in &mut parts {
        if usual == u16::MAX {
            // SAFETY: both types have the same size, and any bits are valid.
            *part = unsafe { transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) };
            low = _mm512_sub_ps(low, widened(_mm512_castsi512_si256(*part)));
            high = _mm512_sub_ps(high, widened(_mm512_extracti64x4_epi64::<1>(*part)));
        } else {
            let words;
            ((words, low), (*part, high)) = (rounded(low), rounded(high));
            let word = |x| _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(x));
            *part = side_by_side(word(words), word(*part));
        }
    }
    parts
}

#[inline]
#[target_feature(enable = "avx512f")]
fn widened(words: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words)))
}

/// x rounded to bf16, in the upper half of a lane, and the rest, which is exact. A finite value that would
/// become infinite is cut instead; a non-finite one has no rest.
#[target_feature(enable = "avx512f")]
fn rounded(x: __m512) -> (__m512i, __m512) {
    let exponent = _mm512_set1_epi32(0x7f80_0000);
    let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    // The exponent of infinities and NaNs, or a carry into it.
    let fits = _mm512_test_epi32_mask(_mm512_andnot_si512(up, exponent), exponent);
    let finite = _mm512_test_epi32_mask(_mm512_andnot_si512(bits, exponent), exponent);
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    let cut = _mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x40_0000));
    let high = _mm512_and_si512(_mm512_mask_mov_epi32(cut, fits & finite, up), upper);
    (high, _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(high)))
}

/// Sums of up to 32 x 32 elements of C; those that are not whole tiles go through a copy.
///
/// # Safety
/// The panels hold `steps` steps of the rows and columns of the part; the rest as for [`blocks`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn sums<const A_PARTS: usize, const B_PARTS: usize>(
    part: Tile,
    add: bool,
    a: &[u32],
    b: &[u32],
    steps: usize,
) {
    assert!(a.len() >= steps * A_PARTS * 2 * TILE && b.len() >= steps * B_PARTS * 2 * TILE);
    let (a, b) = (a.as_ptr(), b.as_ptr());
    // SAFETY: the panels are long enough by the line above, though a second tile that has no row or column
    // of C may have any content; the rest is the caller's guarantee.
    unsafe {
        if part.m == BLOCK && part.n == BLOCK {
            return registers::<A_PARTS, B_PARTS, true, true>(part.c, part.row_stride, add, a, b, steps);
        }
        let mut copy = [0f32; BLOCK * BLOCK];
        for (i, copy) in copy.chunks_exact_mut(BLOCK).take(if add { part.m } else { 0 }).enumerate() {
            part.c.add(i * part.row_stride).copy_to_nonoverlapping(copy.as_mut_ptr(), part.n);
        }
        let c = copy.as_mut_ptr();
        match (part.m > SIDE, part.n > SIDE) {
            (true, true) => registers::<A_PARTS, B_PARTS, true, true>(c, BLOCK, true, a, b, steps),
            (true, false) => registers::<A_PARTS, B_PARTS, true, false>(c, BLOCK, true, a, b, steps),
            (false, true) => registers::<A_PARTS, B_PARTS, false, true>(c, BLOCK, true, a, b, steps),
            (false, false) => registers::<A_PARTS, B_PARTS, false, false>(c, BLOCK, true, a, b, steps),
        }
        for (i, copy) in copy.chunks_exact(BLOCK).take(part.m).enumerate() {
            part.c.add(i * part.row_stride).copy_from_nonoverlapping(copy.as_ptr(), part.n);
        }
    }
}

/// One instruction on tile registers; the compiler uses none of them itself, and keeps the order.
macro_rules! tile {
    (zero $c:literal) => {
        asm!(concat!("tilezero tmm", $c), options(nostack, nomem, preserves_flags))
    };
    (load $t:literal, $from:expr, $stride:expr) => {
        asm!(concat!("tileloadd tmm", $t, ", [{} + {}]"), in(reg) $from, in(reg) $stride,
            options(nostack, readonly, preserves_flags))
    };
    (store $t:literal, $to:expr, $stride:expr) => {
        asm!(concat!("tilestored [{} + {}], tmm", $t), in(reg) $to, in(reg) $stride,
            options(nostack, preserves_flags))
    };
    (multiply $c:literal, $a:literal, $b:literal) => {
        asm!(concat!("tdpbf16ps tmm", $c, ", tmm", $a, ", tmm", $b), options(nostack, nomem, preserves_flags))
    };
}

/// 2 x 2 tiles of C in registers 0 to 3, or fewer: `DOWN` and `RIGHT` say whether the second of a direction
/// is there. Registers 4 and 5 have A, 6 and 7 have B.
///
/// # Safety
/// C is valid for the tiles, the panels for `steps` steps; tiles are configured.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn registers<const A_PARTS: usize, const B_PARTS: usize, const DOWN: bool, const RIGHT: bool>(
    c: *mut f32,
    row_stride: usize,
    add: bool,
    a: *const u32,
    b: *const u32,
    steps: usize,
) {
    let (line, stride) = (64usize, row_stride * 4);
    // SAFETY: the caller's guarantee.
    unsafe {
        let (right, down) = (c.wrapping_add(SIDE), c.wrapping_add(SIDE * row_stride));
        let across = down.wrapping_add(SIDE);
        if add {
            tile!(load 0, c, stride);
            if RIGHT {
                tile!(load 1, right, stride);
            }
            if DOWN {
                tile!(load 2, down, stride);
            }
            if DOWN && RIGHT {
                tile!(load 3, across, stride);
            }
        } else {
            tile!(zero 0);
            tile!(zero 1);
            tile!(zero 2);
            tile!(zero 3);
        }
        for step in 0..steps {
            let a = a.add(step * A_PARTS * 2 * TILE);
            let b = b.add(step * B_PARTS * 2 * TILE);
            let load_b = |part: usize| {
                let b = b.add(part * 2 * TILE);
                tile!(load 6, b, line);
                if RIGHT {
                    tile!(load 7, b.add(TILE), line);
                }
            };
            if B_PARTS == 1 {
                load_b(0);
            }
            for i in (0..A_PARTS).rev() {
                let a = a.add(i * 2 * TILE);
                tile!(load 4, a, line);
                if DOWN {
                    tile!(load 5, a.add(TILE), line);
                }
                for j in (0..B_PARTS.min(PARTS - i)).rev() {
                    if B_PARTS > 1 {
                        load_b(j);
                    }
                    tile!(multiply 0, 4, 6);
                    if RIGHT {
                        tile!(multiply 1, 4, 7);
                    }
                    if DOWN {
                        tile!(multiply 2, 5, 6);
                    }
                    if DOWN && RIGHT {
                        tile!(multiply 3, 5, 7);
                    }
                }
            }
        }
        tile!(store 0, c, stride);
        if RIGHT {
            tile!(store 1, right, stride);
        }
        if DOWN {
            tile!(store 2, down, stride);
        }
        if DOWN && RIGHT {
            tile!(store 3, across, stride);
        }
    }
}
