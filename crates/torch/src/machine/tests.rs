//! Tests of the machine: how much memory a pickle takes.

use super::*;

/// Bytes of everything that the machine holds.
fn memory(machine: &Machine<'_>) -> usize {
    let values = &machine.values;
    size_of::<Node>() * values.nodes.len()
        + size_of::<Id>() * (values.elements.len() + machine.stack.len())
        + size_of::<(Id, Id)>() * values.entries.len()
        + size_of::<(Span, Span)>() * values.globals.len()
        + size_of::<Additions>() * values.additions.len()
        + size_of::<u32>() * (machine.marks.len() + machine.memo.near.len())
        + size_of::<(u32, Id)>() * machine.memo.far.len()
}

/// A pickle of many repetitions: its memory per byte, and its error.
fn flood(start: &[u8], repeated: &[u8]) -> (f64, Option<String>) {
    let count = 300_000 / repeated.len();
    let bytes = [start, &repeated.repeat(count)].concat();
    let mut machine = Machine::new(&bytes, Path::new("x.pt"), 0);
    let error = machine.run().err().map(|e| e.to_string());
    (memory(&machine) as f64 / bytes.len() as f64, error)
}

#[test]
fn memory_is_at_most_20_bytes_for_every_byte_of_a_pickle() {
    assert_eq!(size_of::<Node>(), 16);
    let many = [
        &b"N"[..],
        b"2",
        b"(",
        b"]",
        b"}",
        b")",
        b"K\x07",
        b"\x85",
        b"\x86N",
        b"(t",
        b"(NNNNt",
        b"]Na",
        b"}NNs",
        b"]0",
        b"](e",
        b"ca\nb\n",
        b"ca\nb\n)R",
        b"ca\nb\n)RNb",
        b"ca\nb\n)RNNsNa",
        b"\x8c\x00",
        b"\x94",
        b"q\x00",
        b"h\x00",
        b"Q",
    ];
    for repeated in many {
        let (per_byte, _) = flood(b"\x80\x04Nq\x00", repeated);
        // The integers that every machine begins with are more than 4 KiB.
        assert!(per_byte < 20.1, "{per_byte} {}", repeated.escape_ascii());
    }
    // One list, one dict and one object that grow.
    for (start, repeated) in
        [(&b"]"[..], &b"Na"[..]), (b"]", b"(NNNe"), (b"}", b"NNs"), (b"ca\nb\n)R", b"NNs")]
    {
        let (per_byte, _) = flood(start, repeated);
        assert!(per_byte < 20.1, "{per_byte} {}", repeated.escape_ascii());
    }
}

#[test]
fn the_memo_is_a_list_for_numbers_in_order_and_never_longer_than_the_pickle() {
    let mut memo = Memo::default();
    for number in 0..1000 {
        memo.put(number, number + 7, 2 * number as usize + 2);
    }
    assert_eq!((memo.near.len(), memo.far.len(), memo.count), (1000, 0, 1000));
    memo.put(u32::MAX - 1, 3, 4000);
    memo.put(3999, 4, 4000);
    memo.put(3999, 5, 4000);
    assert_eq!((memo.near.len(), memo.far.len(), memo.count), (4000, 1, 1002));
    assert_eq!((memo.get(999), memo.get(u32::MAX - 1), memo.get(3999)), (Some(1006), Some(3), Some(5)));
    assert_eq!((memo.get(1000), memo.get(u32::MAX)), (None, None));
}

#[test]
fn lists_that_grow_in_turn_keep_their_elements() {
    let mut bytes = b"\x80\x02]q\x00]q\x01".to_vec();
    for number in 0..200 {
        // To the first list, then to the second one.
        bytes.extend([b'h', 0, b'K', number, b'a', b'0', b'h', 1, b'(', b'K', number, b'N', b'e', b'0']);
    }
    bytes.extend(b"h\x00h\x01\x86.");
    let pickle = crate::pickle::Pickle::parse(&bytes, Path::new("x.pt"), 0).unwrap();
    let [first, second] = pickle.elements(pickle.root()).unwrap() else { panic!("not a pair") };
    let first: Vec<i64> =
        pickle.elements(*first).unwrap().iter().map(|id| pickle.int(*id).unwrap()).collect();
    assert_eq!(first, (0..200).collect::<Vec<i64>>());
    let second = pickle.elements(*second).unwrap();
    assert_eq!(second.len(), 400);
    assert!(second.chunks(2).enumerate().all(|(n, pair)| pickle.int(pair[0]) == Some(n as i64)));
    assert!(second.chunks(2).all(|pair| pickle.node(pair[1]) == Node::None));
}
