//! What a configuration key is, and the macro that makes the entries of the table in keys.rs into structs and
//! [`Key`]s.

use std::collections::BTreeMap;
use std::ops::Bound::{self, Excluded, Included, Unbounded};
use std::ops::RangeBounds;
use std::path::PathBuf;

use ballast_kernels::muon::AdjustLr;
use ballast_model::{IndexerStage, Recompute};
use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor};
use serde::forward_to_deserialize_any;
use toml::Value;

use super::choices::{MomentStorage, OnFault, OnSpike, OptimizerKind, ScheduleKind, Shard, TimeSteps};
use super::resume::OnResume;
use crate::data::{DataFile, Packing};
use crate::error::{Error, Result};

/// A configuration key: an entry of [`KEYS`](super::KEYS).
#[derive(Debug)]
pub struct Key {
    /// Path, as in `optimizer.muon.eps`.
    pub name: &'static str,
    /// Rule for a new value when a run is resumed.
    pub on_resume: OnResume,
    pub(super) doc: &'static str,
    pub(super) range: Range,
    pub(super) kind: fn() -> String,
    pub(super) default: fn() -> Option<Value>,
    pub(super) accepts: fn(&Value) -> bool,
}

impl Key {
    /// Meaning of the key, without a full stop.
    pub fn help(&self) -> &'static str {
        self.doc.trim().trim_end_matches('.')
    }

    /// Values that the key takes: the type with its range, or the choices.
    pub fn values(&self) -> String {
        let kind = (self.kind)();
        let noun = ["a ", "an "].iter().find_map(|article| kind.strip_prefix(article)).unwrap_or(&kind);
        match self.range {
            ANY => noun.into(),
            range => format!("{noun}, {}", words(range)),
        }
    }

    /// Default value as TOML; `None` if the key is not set by default.
    pub fn default(&self) -> Option<String> {
        (self.default)().map(|value| match value {
            Value::Float(small) if small != 0.0 && small.abs() < 1e-2 => format!("{small:e}"),
            value => value.to_string(),
        })
    }

    /// Returns an error for a value of another type or out of range; a range applies to each number of a list.
    pub(super) fn check(&self, value: &Value) -> Result {
        let refuse = |wanted: &str, got: &Value| {
            Err(Error::config(self.name, format!("`{}` must be {wanted}, got {got}", self.name)))
        };
        for value in value.as_array().map_or(std::slice::from_ref(value), |values| values) {
            let number = value.as_float().or(value.as_integer().map(|integer| integer as f64));
            match number {
                Some(number) if !number.is_finite() => return refuse("finite", value),
                Some(number) if !self.range.contains(&number) => return refuse(&words(self.range), value),
                _ => {}
            }
        }
        if (self.accepts)(value) { Ok(()) } else { refuse(&(self.kind)(), value) }
    }
}

/// Range of a number.
pub(super) type Range = (Bound<f64>, Bound<f64>);

/// Any finite number, and all that is not a number.
pub(super) const ANY: Range = (Unbounded, Unbounded);

pub(super) const fn at_least(low: u64) -> Range {
    (Included(low as f64), Unbounded)
}

pub(super) const fn above(low: u64) -> Range {
    (Excluded(low as f64), Unbounded)
}

pub(super) const fn between(low: u64, high: u64) -> Range {
    (Included(low as f64), Included(high as f64))
}

pub(super) const fn from_to_below(low: u64, high: u64) -> Range {
    (Included(low as f64), Excluded(high as f64))
}

/// A range in words, after "must be".
fn words(range: Range) -> String {
    let low = match range.0 {
        Included(low) => format!("at least {low}"),
        Excluded(low) => format!("above {low}"),
        Unbounded => String::new(),
    };
    match range {
        (Included(low), Included(high)) => format!("{low} to {high}"),
        (_, Excluded(high)) => format!("{low} and below {high}"),
        _ => low,
    }
}

/// Type of the values of a key, in words with an article.
pub(super) trait Kind: DeserializeOwned {
    /// The choices of an enum; other types name themselves.
    fn kind() -> String {
        let mut names: &[&str] = &[];
        Self::deserialize(Choices(&mut names)).err();
        let (last, others) = names.split_last().expect("a type without a name is an enum");
        format!("{} or {last}", others.join(", "))
    }
}

impl Kind for AdjustLr {}
impl Kind for IndexerStage {}
impl Kind for MomentStorage {}
impl Kind for OnFault {}
impl Kind for OnSpike {}
impl Kind for OptimizerKind {}
impl Kind for Packing {}
impl Kind for Recompute {}
impl Kind for ScheduleKind {}
impl Kind for Shard {}
impl Kind for TimeSteps {}

impl<T: Kind> Kind for Option<T> {
    fn kind() -> String {
        T::kind()
    }
}

macro_rules! kinds {
    ($($type:ty: $words:literal,)*) => {
        $(impl Kind for $type {
            fn kind() -> String {
                $words.into()
            }
        })*
    };
}

kinds! {
    bool: "true or false",
    u64: "an integer",
    usize: "an integer",
    f32: "a number",
    f64: "a number",
    [f64; 3]: "a list of 3 numbers",
    String: "a string",
    PathBuf: "a path",
    Vec<String>: "a list of strings",
    Vec<DataFile>: "a list of { path, weight }",
    BTreeMap<String, String>: "a table of strings",
}

/// A deserializer without input. An enum tells it the names of its variants, as serde reads them.
struct Choices<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Choices<'_> {
    type Error = toml::de::Error;

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = variants;
        self.deserialize_any(visitor)
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(Self::Error::custom("no input"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// Makes sections of the configuration into structs with defaults, and the list `KEYS`. keys.rs has the form of an
/// entry.
macro_rules! sections {
    ($(
        $(#[doc = $about:literal])+
        $section:ident $path:literal {
            $(
                $(#[doc = $doc:literal])+
                $(#[serde($serde:meta)])?
                $key:ident: $type:ty = $default:expr $(, $range:expr)? => $rule:expr;
            )*
            $(section $inner:ident: $inner_type:ty;)*
        }
    )*) => {
        $(
            $(#[doc = $about])+
            #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
            #[serde(default, deny_unknown_fields)]
            pub struct $section {
                $(
                    $(#[doc = $doc])+
                    $(#[serde($serde)])?
                    pub $key: $type,
                )*
                $(
                    #[doc = concat!("The section `", stringify!($inner), "`.")]
                    pub $inner: $inner_type,
                )*
            }

            impl Default for $section {
                fn default() -> $section {
                    $section { $($key: $default,)* $($inner: Default::default(),)* }
                }
            }
        )*

        /// Every configuration key.
        pub const KEYS: &[Key] = &[$($(
            Key {
                name: concat!($path, stringify!($key)),
                on_resume: $rule,
                doc: concat!($($doc),+),
                range: [$($range,)? ANY][0],
                kind: <$type as Kind>::kind,
                default: || {
                    let default: $type = $default;
                    Value::try_from(default).ok()
                },
                accepts: |value| value.clone().try_into::<$type>().is_ok(),
            },
        )*)*];
    };
}
pub(super) use sections;
