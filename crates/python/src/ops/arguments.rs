//! Torch tensors as slices, without a copy.

use std::ops::Range;

use ballast_kernels::KernelError;
use half::bf16;
use pyo3::prelude::*;

use crate::errors::UsageError;

/// A torch tensor.
pub type Tensor<'py> = Bound<'py, PyAny>;

/// Element type of a slice. Every bit pattern is a value of it.
pub trait Storage: Copy {
    /// Name of the dtype in torch.
    const DTYPE: &'static str;
}

impl Storage for f32 {
    const DTYPE: &'static str = "torch.float32";
}

impl Storage for bf16 {
    const DTYPE: &'static str = "torch.bfloat16";
}

impl Storage for i64 {
    const DTYPE: &'static str = "torch.int64";
}

/// Stored as int32, because torch has few operations on uint32; the mark of an unused slot is then -1.
impl Storage for u32 {
    const DTYPE: &'static str = "torch.int32";
}

/// Storage type of an operation.
#[derive(Clone, Copy)]
pub enum Dtype {
    F32,
    Bf16,
}

/// Storage type of a tensor: f32 or bf16.
pub fn dtype(name: &str, tensor: &Tensor<'_>) -> PyResult<Dtype> {
    let found = tensor.getattr("dtype")?.str()?.to_string();
    match found.as_str() {
        f32::DTYPE => Ok(Dtype::F32),
        bf16::DTYPE => Ok(Dtype::Bf16),
        _ => Err(UsageError::new_err(format!("{name} must be torch.float32 or torch.bfloat16, got {found}"))),
    }
}

/// Evaluates an expression with the type `$T` of a tensor's elements.
macro_rules! with_dtype {
    ($name:literal, $tensor:expr, $T:ident => $body:expr) => {
        match $crate::ops::arguments::dtype($name, $tensor)? {
            $crate::ops::arguments::Dtype::F32 => {
                type $T = f32;
                $body
            }
            $crate::ops::arguments::Dtype::Bf16 => {
                type $T = half::bf16;
                $body
            }
        }
    };
}
pub(super) use with_dtype;

/// Shape of a tensor of N dimensions. The product of its non-zero sizes fits in memory.
pub fn shape<const N: usize>(name: &str, tensor: &Tensor<'_>) -> PyResult<[usize; N]> {
    let found: Vec<usize> = tensor.getattr("shape")?.extract()?;
    let sizes = found.iter().filter(|size| **size > 0);
    let product = sizes.copied().try_fold(size_of::<f32>(), usize::checked_mul);
    if product.is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(UsageError::new_err(format!(
            "{name}: shape {found:?} has more elements than memory can hold"
        )));
    }
    <[usize; N]>::try_from(found)
        .map_err(|found| UsageError::new_err(format!("{name} must have {N} dimensions, got {}", found.len())))
}

/// Slices of the tensors of one call. A written slice overlaps no other.
#[derive(Default)]
pub struct Arguments {
    read: Vec<Range<usize>>,
    written: Vec<Range<usize>>,
}

impl Arguments {
    /// Elements of an input.
    pub fn input<'a, T: Storage>(&mut self, name: &str, tensor: &'a Tensor<'_>) -> PyResult<&'a [T]> {
        let (address, len) = memory::<T>(name, tensor)?;
        let range = address..address + len * size_of::<T>();
        check_disjoint(name, &range, &self.written)?;
        self.read.push(range);
        if len == 0 {
            return Ok(&[]);
        }
        // SAFETY: `memory` checked that the tensor is in the memory of this process, contiguous, of type T
        // and aligned, and it has `len` elements; all bit patterns are values of T. The reference to the
        // tensor keeps it alive for 'a. No slice of this call that is written overlaps it. Another thread
        // must not write to it meanwhile, which holds for every operation of torch.
        Ok(unsafe { std::slice::from_raw_parts(address as *const T, len) })
    }

    /// Elements of an input, if there is one.
    pub fn optional<'a, T: Storage>(
        &mut self,
        name: &str,
        tensor: Option<&'a Tensor<'_>>,
    ) -> PyResult<Option<&'a [T]>> {
        tensor.map(|tensor| self.input(name, tensor)).transpose()
    }

    /// Elements of an output.
    #[allow(clippy::mut_from_ref)] // the memory belongs to torch; `written` ensures that it is borrowed once
    pub fn output<'a, T: Storage>(&mut self, name: &str, tensor: &'a Tensor<'_>) -> PyResult<&'a mut [T]> {
        let (address, len) = memory::<T>(name, tensor)?;
        let range = address..address + len * size_of::<T>();
        check_disjoint(name, &range, &self.written)?;
        check_disjoint(name, &range, &self.read)?;
        self.written.push(range);
        if len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as in `input`; in addition no other slice of this call overlaps it.
        Ok(unsafe { std::slice::from_raw_parts_mut(address as *mut T, len) })
    }

    /// Elements of an output that is empty where it is not wanted: an op of torch returns no optional tensor.
    #[allow(clippy::mut_from_ref)] // as in `output`
    pub fn optional_output<'a, T: Storage>(
        &mut self,
        name: &str,
        tensor: &'a Tensor<'_>,
    ) -> PyResult<Option<&'a mut [T]>> {
        Ok(Some(self.output(name, tensor)?).filter(|elements: &&mut [T]| !elements.is_empty()))
    }

    /// Elements of the gradient of such an output, if there is one.
    pub fn optional_gradient<'a, T: Storage>(
        &mut self,
        name: &str,
        tensor: Option<&'a Tensor<'_>>,
    ) -> PyResult<Option<&'a [T]>> {
        Ok(self.optional(name, tensor)?.filter(|elements: &&[T]| !elements.is_empty()))
    }
}

/// Copies values of a kernel to an output.
pub fn copy(name: &'static str, output: &mut [f32], saved: &[f32]) -> Result<(), KernelError> {
    if output.len() != saved.len() {
        return Err(KernelError::Length { name, expected: saved.len(), found: output.len() });
    }
    output.copy_from_slice(saved);
    Ok(())
}

/// Address and number of elements of a contiguous CPU tensor of type T.
fn memory<T: Storage>(name: &str, tensor: &Tensor<'_>) -> PyResult<(usize, usize)> {
    let device: String = tensor.getattr("device")?.getattr("type")?.extract()?;
    if device != "cpu" {
        return Err(UsageError::new_err(format!("{name} must be on the CPU, got {device}")));
    }
    let dtype = tensor.getattr("dtype")?.str()?.to_string();
    if dtype != T::DTYPE {
        return Err(UsageError::new_err(format!("{name} must be {}, got {dtype}", T::DTYPE)));
    }
    if !tensor.call_method0("is_contiguous")?.extract::<bool>()? {
        return Err(UsageError::new_err(format!("{name} must be contiguous")));
    }
    let len: usize = tensor.call_method0("numel")?.extract()?;
    let address: usize = tensor.call_method0("data_ptr")?.extract()?;
    let fits = len.checked_mul(size_of::<T>()).is_some_and(|bytes| address.checked_add(bytes).is_some());
    if !fits || (len > 0 && address == 0) || !address.is_multiple_of(align_of::<T>()) {
        return Err(UsageError::new_err(format!("{name} has no memory that can be read as {}", T::DTYPE)));
    }
    Ok((address, len))
}

fn check_disjoint(name: &str, range: &Range<usize>, others: &[Range<usize>]) -> PyResult<()> {
    if others.iter().any(|other| range.start < other.end && other.start < range.end) {
        return Err(UsageError::new_err(format!(
            "{name} shares memory with another argument, and one of them is written"
        )));
    }
    Ok(())
}
