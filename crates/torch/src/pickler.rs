//! Writes pickles of protocol 2: the data that torch and Megatron expect beside tensors, and nothing else.

use ballast_contract::Dtype;
use serde_json::Value;

/// A pickle that is being written. Every method appends one value, or an operation on the values before it.
pub(super) struct Pickler(Vec<u8>);

impl Pickler {
    pub(super) fn new() -> Pickler {
        Pickler(vec![0x80, 2])
    }

    /// Ends the pickle.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.0.push(b'.');
        self.0
    }

    pub(super) fn none(&mut self) -> &mut Pickler {
        self.0.push(b'N');
        self
    }

    pub(super) fn truth(&mut self, value: bool) -> &mut Pickler {
        self.0.push(if value { 0x88 } else { 0x89 });
        self
    }

    pub(super) fn integer(&mut self, value: i64) -> &mut Pickler {
        match i32::try_from(value) {
            Ok(small) => {
                self.0.push(b'J');
                self.0.extend(small.to_le_bytes());
            }
            Err(_) => {
                self.0.extend([0x8a, 8]);
                self.0.extend(value.to_le_bytes());
            }
        }
        self
    }

    pub(super) fn float(&mut self, value: f64) -> &mut Pickler {
        self.0.push(b'G');
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn text(&mut self, text: &str) -> &mut Pickler {
        self.0.push(b'X');
        self.0.extend((text.len() as u32).to_le_bytes());
        self.0.extend(text.as_bytes());
        self
    }

    /// A class or function.
    pub(super) fn global(&mut self, module: &str, name: &str) -> &mut Pickler {
        self.0.extend(format!("c{module}\n{name}\n").bytes());
        self
    }

    /// A tuple of what `items` appends.
    pub(super) fn tuple(&mut self, items: impl FnOnce(&mut Pickler)) -> &mut Pickler {
        self.0.push(b'(');
        items(self);
        self.0.push(b't');
        self
    }

    /// A list of what `items` appends.
    pub(super) fn list(&mut self, items: impl FnOnce(&mut Pickler)) -> &mut Pickler {
        self.0.extend(b"](");
        items(self);
        self.0.push(b'e');
        self
    }

    /// A dict of the keys and values that `items` appends in turn.
    pub(super) fn dict(&mut self, items: impl FnOnce(&mut Pickler)) -> &mut Pickler {
        self.0.extend(b"}(");
        items(self);
        self.0.push(b'u');
        self
    }

    /// Calls the function before the tuple of arguments.
    pub(super) fn call(&mut self) -> &mut Pickler {
        self.0.push(b'R');
        self
    }

    /// An object of a class with the state that `state` appends.
    pub(super) fn object(
        &mut self,
        module: &str,
        class: &str,
        state: impl FnOnce(&mut Pickler),
    ) -> &mut Pickler {
        self.global(module, class);
        self.0.extend(b")\x81");
        state(self);
        self.0.push(b'b');
        self
    }

    /// `torch.Size`.
    pub(super) fn size(&mut self, sizes: &[u64]) -> &mut Pickler {
        self.global("torch", "Size");
        self.tuple(|p| {
            p.integers(sizes);
        });
        self.call()
    }

    /// A tuple of integers.
    pub(super) fn integers(&mut self, values: &[u64]) -> &mut Pickler {
        self.tuple(|p| {
            for value in values {
                p.integer(*value as i64);
            }
        })
    }

    /// A value of JSON.
    pub(super) fn json(&mut self, value: &Value) -> &mut Pickler {
        match value {
            Value::Null => self.none(),
            Value::Bool(value) => self.truth(*value),
            Value::Number(number) => match number.as_i64() {
                Some(integer) => self.integer(integer),
                None => self.float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => self.text(text),
            Value::Array(items) => self.list(|p| {
                for item in items {
                    p.json(item);
                }
            }),
            Value::Object(items) => self.dict(|p| {
                for (key, value) in items {
                    p.text(key).json(value);
                }
            }),
        }
    }

    /// A contiguous tensor in the storage `key` of the file.
    pub(super) fn tensor(&mut self, key: usize, dtype: StoredType, shape: &[u64]) -> &mut Pickler {
        let elements: u64 = shape.iter().product();
        let strides = ballast_files::assembly::row_major(shape);
        self.global("torch._utils", "_rebuild_tensor_v2");
        self.tuple(|p| {
            p.tuple(|p| {
                p.text("storage").global("torch", dtype.storage);
                p.text(&key.to_string()).text("cpu").integer(elements as i64);
            });
            p.0.push(b'Q');
            p.integer(0).integers(shape).integers(&strides).truth(false);
            p.global("collections", "OrderedDict").tuple(|_| {}).call();
        });
        self.call()
    }
}

/// Names of an element type in torch.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredType {
    pub(super) name: &'static str,
    pub(super) storage: &'static str,
}

/// Returns the names of an element type; `None` if files of torch before 2.1 had none.
pub(super) fn stored_type(dtype: Dtype) -> Option<StoredType> {
    let (name, storage) = match dtype {
        Dtype::F64 => ("float64", "DoubleStorage"),
        Dtype::F32 => ("float32", "FloatStorage"),
        Dtype::Bf16 => ("bfloat16", "BFloat16Storage"),
        Dtype::F16 => ("float16", "HalfStorage"),
        Dtype::I64 => ("int64", "LongStorage"),
        Dtype::I32 => ("int32", "IntStorage"),
        Dtype::I16 => ("int16", "ShortStorage"),
        Dtype::I8 => ("int8", "CharStorage"),
        Dtype::U8 => ("uint8", "ByteStorage"),
        Dtype::Bool => ("bool", "BoolStorage"),
        _ => return None,
    };
    Some(StoredType { name, storage })
}
