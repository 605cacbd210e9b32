//! Functions and classes that a pickle may name.
//!
//! Nothing that a pickle names is called, so no name can do harm here. There are three kinds:
//! - *known*: those with which torch, numpy and Megatron describe tensors ([`ALLOWED`]). They are understood;
//! - *opaque*: data beside the tensors, such as a set, a date or a configuration of another package. Such a value is
//!   kept as it is written, named and counted, and never looked through for anything but lost tensors;
//! - *refused*: every other function or class of Python itself, and every other function of torch and numpy. These
//!   are what a pickle that attacks its reader is made of, and no value needs them: whoever gets the file should
//!   know before another program loads it.

use std::collections::HashSet;
use std::sync::LazyLock;

/// Known functions and classes, by module.
pub const ALLOWED: &[(&str, &[&str])] = &[
    ("_codecs", &["encode"]),
    ("argparse", &["Namespace"]),
    ("collections", &["OrderedDict", "defaultdict"]),
    ("megatron.core.enums", &["ModelType"]),
    ("megatron.core.transformer.enums", &["AttnBackend", "AttnMaskType", "AttnType", "LayerType"]),
    ("numpy", &["dtype", "ndarray"]),
    ("numpy._core.multiarray", &["_reconstruct", "scalar"]),
    ("numpy._core.numeric", &["_frombuffer"]),
    ("numpy.core.multiarray", &["_reconstruct", "scalar"]),
    ("numpy.core.numeric", &["_frombuffer"]),
    ("pathlib", &["Path", "PosixPath", "PurePosixPath"]),
    ("torch", TORCH),
    ("torch._tensor", &["_rebuild_from_type_v2"]),
    (
        "torch._utils",
        &[
            "_rebuild_parameter",
            "_rebuild_parameter_with_state",
            "_rebuild_tensor",
            "_rebuild_tensor_v2",
            "_rebuild_tensor_v3",
        ],
    ),
    ("torch.distributed.checkpoint.filesystem", &["_StorageInfo"]),
    (
        "torch.distributed.checkpoint.metadata",
        &[
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ],
    ),
    ("torch.distributed.checkpoint.planner", &["SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"]),
    ("torch.nn.parameter", &["Buffer", "Parameter"]),
    ("torch.serialization", &["_get_layout"]),
    ("torch.storage", &["UntypedStorage"]),
];

/// Element types, and the storages and sizes of tensors.
const TORCH: &[&str] = &[
    "BFloat16Storage",
    "BoolStorage",
    "ByteStorage",
    "CharStorage",
    "DoubleStorage",
    "FloatStorage",
    "HalfStorage",
    "IntStorage",
    "LongStorage",
    "ShortStorage",
    "Size",
    "Tensor",
    "bfloat16",
    "bool",
    "device",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
];

/// Classes of Python itself that hold data, and functions with which they are saved.
const DATA: &[(&str, &[&str])] = &[
    ("__builtin__", BUILTINS),
    ("array", &["_array_reconstructor", "array"]),
    ("builtins", BUILTINS),
    ("collections", &["ChainMap", "Counter", "UserDict", "UserList", "UserString", "deque"]),
    ("copy_reg", &["_reconstructor"]),
    ("copyreg", &["_reconstructor"]),
    ("datetime", &["date", "datetime", "time", "timedelta", "timezone"]),
    ("decimal", &["Decimal"]),
    ("fractions", &["Fraction"]),
    ("ipaddress", &["IPv4Address", "IPv4Network", "IPv6Address", "IPv6Network"]),
    ("pathlib", PATHS),
    ("pathlib._local", PATHS),
    ("time", &["struct_time"]),
    ("types", &["SimpleNamespace"]),
    ("uuid", &["SafeUUID", "UUID"]),
    ("zoneinfo", &["ZoneInfo"]),
];

const BUILTINS: &[&str] = &[
    "Ellipsis",
    "NotImplemented",
    "bool",
    "bytearray",
    "bytes",
    "complex",
    "dict",
    "float",
    "frozenset",
    "int",
    "list",
    "long",
    "object",
    "range",
    "set",
    "slice",
    "str",
    "tuple",
    "unicode",
    "xrange",
];
const PATHS: &[&str] = &["Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"];

/// Values of torch and numpy that are written in small letters, as functions are.
const VALUES: &[(&str, &[&str])] = &[
    (
        "numpy",
        &[
            "bool_", "float16", "float32", "float64", "int16", "int32", "int64", "int8", "uint16", "uint32",
            "uint64", "uint8",
        ],
    ),
    ("numpy.random._pickle", &["__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor"]),
    (
        "torch",
        &[
            "bits16",
            "bits1x8",
            "bits2x4",
            "bits4x2",
            "bits8",
            "channels_last",
            "channels_last_3d",
            "complex128",
            "complex32",
            "complex64",
            "contiguous_format",
            "float4_e2m1fn_x2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
            "jagged",
            "per_channel_affine",
            "per_channel_affine_float_qparams",
            "per_channel_symmetric",
            "per_tensor_affine",
            "per_tensor_symmetric",
            "preserve_format",
            "qint32",
            "qint8",
            "quint2x4",
            "quint4x2",
            "quint8",
            "sparse_bsc",
            "sparse_bsr",
            "sparse_coo",
            "sparse_csc",
            "sparse_csr",
            "strided",
        ],
    ),
];

/// Modules of Python itself, 2 and 3, but for those that begin with an underscore; in alphabetical order.
const PYTHON: &str = "\
    StringIO UserDict abc aifc antigravity argparse array ast asynchat asyncio asyncore atexit audioop \
    base64 bdb binascii bisect builtins bz2 cPickle cProfile cStringIO calendar cgi cgitb chunk cmath cmd \
    code codecs codeop collections colorsys commands compileall compiler concurrent configparser contextlib \
    contextvars copy copy_reg copyreg crypt csv ctypes curses dataclasses datetime dbm decimal difflib dis \
    distutils doctest email encodings ensurepip enum errno exceptions faulthandler fcntl filecmp fileinput \
    fnmatch fractions ftplib functools gc genericpath getopt getpass gettext glob graphlib grp gzip hashlib \
    heapq hmac html http idlelib imaplib imghdr imp importlib inspect io ipaddress itertools json keyword \
    lib2to3 linecache locale logging lzma mailbox mailcap marshal math mimetypes mmap modulefinder msilib \
    msvcrt multiprocessing netrc nis nntplib nt ntpath nturl2path numbers opcode operator optparse os \
    ossaudiodev pathlib pdb pickle pickletools pipes pkgutil platform plistlib popen2 poplib posix posixpath \
    pprint profile pstats pty pwd py_compile pyclbr pydoc pydoc_data pyexpat queue quopri random re readline \
    reprlib resource rlcompleter runpy sched secrets select selectors shelve shlex shutil signal site smtpd \
    smtplib sndhdr socket socketserver spwd sqlite3 sre_compile sre_constants sre_parse ssl stat statistics \
    string stringprep struct subprocess sunau symtable sys sysconfig syslog tabnanny tarfile telnetlib \
    tempfile termios textwrap this thread threading time timeit tkinter token tokenize tomllib trace \
    traceback tracemalloc tty turtle turtledemo types typing unicodedata unittest urllib urllib2 uu uuid \
    venv warnings wave weakref webbrowser winreg winsound wsgiref xdrlib xml xmlrpc zipapp zipfile zipimport \
    zlib zoneinfo";

/// Returns true if a pickle may name a function or class.
pub(super) fn is_accepted(module: &str, name: &str) -> bool {
    let listed =
        |lists: &[(&str, &[&str])]| lists.iter().any(|(own, names)| *own == module && names.contains(&name));
    if module.is_empty() || name.is_empty() {
        return false;
    }
    if listed(ALLOWED) || listed(DATA) || listed(VALUES) {
        return true;
    }
    let package = module.split('.').next().unwrap_or_default();
    match package {
        // A class, or a function that makes a kind of tensor: which kinds are not understood is decided where a
        // tensor is needed. A name with a dot is an attribute of a class, which may be a function.
        "torch" | "numpy" => is_class(name) || name.starts_with("_rebuild") && !name.contains('.'),
        "__main__" => true,
        _ => !package.starts_with('_') && !is_python(package),
    }
}

/// Returns true for a name that begins with a capital letter, as those of classes do.
fn is_class(name: &str) -> bool {
    !name.contains('.') && name.trim_start_matches('_').starts_with(|first: char| first.is_ascii_uppercase())
}

fn is_python(package: &str) -> bool {
    static NAMES: LazyLock<HashSet<&str>> = LazyLock::new(|| PYTHON.split_ascii_whitespace().collect());
    NAMES.contains(package)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_of_other_packages_is_accepted_and_functions_that_reach_the_system_are_not() {
        for (module, name) in [
            ("collections", "Counter"),
            ("__builtin__", "set"),
            ("datetime", "datetime"),
            ("omegaconf.dictconfig", "DictConfig"),
            ("__main__", "Settings"),
            ("torch.torch_version", "TorchVersion"),
            ("torch._utils", "_rebuild_sparse_tensor"),
            ("numpy.random._pickle", "__randomstate_ctor"),
        ] {
            assert!(is_accepted(module, name), "{module}.{name}");
        }
        for (module, name) in [
            ("os", "system"),
            ("posix", "system"),
            ("nt", "system"),
            ("os.path", "join"),
            ("__builtin__", "eval"),
            ("builtins", "getattr"),
            ("operator", "methodcaller"),
            ("functools", "partial"),
            ("importlib", "import_module"),
            ("_pickle", "loads"),
            ("pickle", "loads"),
            ("torch", "load"),
            ("torch.hub", "load"),
            ("torch.nn", "Module.load_state_dict"),
            ("numpy.testing._private.utils", "runstring"),
            ("datetime", "sys.modules"),
            ("", "system"),
            ("os", ""),
        ] {
            assert!(!is_accepted(module, name), "{module}.{name}");
        }
    }
}
