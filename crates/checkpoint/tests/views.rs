//! Views (slices and concatenations) against the same operations on tensors in memory.

use std::sync::Arc;

use ballast_checkpoint::{Checkpoint, View};
use ballast_files::cast::Buffer;
use proptest::prelude::*;

use crate::common::{f32_tensor, f32_values, open, write_file};

/// A dense tensor in memory, the reference of a view.
#[derive(Clone, Debug, PartialEq)]
struct Dense {
    shape: Vec<u64>,
    values: Vec<f32>,
}

impl Dense {
    fn slice(&self, dim: usize, from: u64, to: u64) -> Dense {
        let outer: u64 = self.shape[..dim].iter().product();
        let inner: u64 = self.shape[dim + 1..].iter().product();
        let mut values = Vec::new();
        for o in 0..outer {
            for r in from..to {
                let begin = ((o * self.shape[dim] + r) * inner) as usize;
                values.extend_from_slice(&self.values[begin..begin + inner as usize]);
            }
        }
        let mut shape = self.shape.clone();
        shape[dim] = to - from;
        Dense { shape, values }
    }

    fn concat(parts: &[Dense], dim: usize) -> Dense {
        let outer: u64 = parts[0].shape[..dim].iter().product();
        let mut shape = parts[0].shape.clone();
        shape[dim] = parts.iter().map(|p| p.shape[dim]).sum();
        let mut values = Vec::new();
        for o in 0..outer as usize {
            for p in parts {
                let width = p.values.len() / outer as usize;
                values.extend_from_slice(&p.values[o * width..(o + 1) * width]);
            }
        }
        Dense { shape, values }
    }
}

fn stored(shape: [usize; 3]) -> (tempfile::TempDir, Arc<Checkpoint>, Dense) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| i as f32).collect();
    write_file(&path, &[f32_tensor("other", &[3], &[9.0; 3]), f32_tensor("x", &shape, &values)]);
    let checkpoint = open(&path);
    (folder, checkpoint, Dense { shape: shape.map(|d| d as u64).to_vec(), values })
}

fn read(view: &View, from: u64, to: u64) -> Vec<f32> {
    let mut out = Buffer::default();
    view.read(from..to, &mut out, &mut Buffer::default()).unwrap();
    f32_values(out.as_ref())
}

/// One step: slice along a dimension, or split and concatenate in another order.
#[derive(Clone, Debug)]
enum Step {
    Slice { dim: usize, from: f64, to: f64 },
    Shuffle { dim: usize, at: f64, swap: bool },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0usize..3, 0.0..1.0f64, 0.0..1.0f64).prop_map(|(dim, from, to)| Step::Slice { dim, from, to }),
        (0usize..3, 0.0..1.0f64, any::<bool>()).prop_map(|(dim, at, swap)| Step::Shuffle { dim, at, swap }),
    ]
}

proptest! {
    #[test]
    fn any_tree_of_slices_and_joins_reads_as_the_same_tree_in_memory(
        shape in [1usize..5, 1usize..6, 1usize..4],
        steps in prop::collection::vec(step(), 0..8),
        cut in (0.0..1.0f64, 0.0..1.0f64),
    ) {
        let (_folder, checkpoint, mut dense) = stored(shape);
        let index = checkpoint.tensors.iter().position(|t| t.name == "x").unwrap();
        let mut view = View::stored(&checkpoint, index);
        for step in steps {
            match step {
                Step::Slice { dim, from, to } => {
                    let size = dense.shape[dim];
                    let (a, b) = ((from * size as f64) as u64, (to * size as f64) as u64);
                    let (a, b) = (a.min(b), a.max(b) + 1);
                    dense = dense.slice(dim, a, b);
                    view = view.slice(dim, a..b).unwrap();
                }
                Step::Shuffle { dim, at, swap } => {
                    let size = dense.shape[dim];
                    let at = (at * (size + 1) as f64) as u64;
                    let (mut d, mut v) = (
                        vec![dense.slice(dim, 0, at), dense.slice(dim, at, size)],
                        vec![view.slice(dim, 0..at).unwrap(), view.slice(dim, at..size).unwrap()],
                    );
                    if swap {
                        d.reverse();
                        v.reverse();
                    }
                    dense = Dense::concat(&d, dim);
                    view = View::concat("x", dim, &v).unwrap();
                }
            }
        }
        prop_assert_eq!(&view.shape, &dense.shape);
        prop_assert_eq!(read(&view, 0, view.units()), dense.values.clone());
        let (a, b) = ((cut.0 * view.units() as f64) as u64, (cut.1 * view.units() as f64) as u64);
        let (a, b) = (a.min(b), a.max(b));
        prop_assert_eq!(read(&view, a, b), dense.values[a as usize..b as usize].to_vec());
    }
}

#[test]
fn slices_joined_again_are_the_stored_tensor() {
    let (_folder, checkpoint, _) = stored([4, 3, 2]);
    let index = checkpoint.tensors.iter().position(|t| t.name == "x").unwrap();
    let whole = View::stored(&checkpoint, index);
    for dim in 0..3 {
        let size = whole.shape[dim];
        let rows: Vec<View> = (0..size).map(|i| whole.slice(dim, i..i + 1).unwrap()).collect();
        let joined = View::concat("x", dim, &rows).unwrap();
        assert_eq!(joined.sources().len(), 1, "dimension {dim}: the tree has not been simplified");
        assert_eq!(read(&joined, 0, 24), read(&whole, 0, 24));
    }
}

#[test]
fn impossible_views_are_errors_that_name_the_tensor() {
    let (_folder, checkpoint, _) = stored([4, 3, 2]);
    let view = View::stored(&checkpoint, checkpoint.tensors.iter().position(|t| t.name == "x").unwrap());
    for error in [
        view.slice(0, 3..5).unwrap_err(),
        view.slice(3, 0..1).unwrap_err(),
        view.clone().reshaped(&[5, 5]).unwrap_err(),
        View::concat("x", 0, &[view.clone(), view.slice(1, 0..1).unwrap()]).unwrap_err(),
        View::concat("x", 0, &[]).unwrap_err(),
    ] {
        assert!(error.to_string().starts_with("tensor \"x\": "), "{error}");
    }
}
