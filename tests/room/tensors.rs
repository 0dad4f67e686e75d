//! safetensors files: written and read back, and refused when they are not whole.

use oclaw::tensors::{Dtype, Error, Reader, Writer};

fn heads() -> Vec<(String, Dtype, Vec<usize>)> {
    vec![("b".to_owned(), Dtype::F32, vec![2, 1]), ("a".to_owned(), Dtype::BF16, vec![3])]
}

#[test]
fn what_is_written_is_read_back_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let mut writer = Writer::create(&path, heads()).unwrap();
    writer.write(&[1; 8]).unwrap();
    writer.write(&[2; 6]).unwrap();
    writer.finish().unwrap();
    let reader = Reader::open(&path).unwrap();
    let names: Vec<_> = reader.entries().iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(names, ["b", "a"]);
    assert_eq!(reader.entries()[0].shape, [2, 1]);
    assert_eq!(reader.read(&reader.entries()[1]).unwrap(), [2; 6]);
    // The other implementation reads it too.
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes[8..].iter().position(|&byte| byte == 1).unwrap() % 8, 0);
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
}

#[test]
fn bytes_that_were_not_announced_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let mut writer = Writer::create(&path, heads()).unwrap();
    let error = writer.write(&[1; 7]).unwrap_err();
    assert!(matches!(error, Error::WrongSize { found: 7, wanted: 8, .. }), "{error}");
    let mut writer = Writer::create(&path, heads()).unwrap();
    writer.write(&[1; 8]).unwrap();
    let error = writer.finish().unwrap_err();
    assert!(matches!(error, Error::WrongSize { found: 0, wanted: 6, .. }), "{error}");
    let huge = [("h".to_owned(), Dtype::F32, vec![usize::MAX, 2])];
    assert!(matches!(Writer::create(&path, huge), Err(Error::Malformed { .. })));
}

#[test]
fn a_header_that_lies_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    for header in [
        "not json",
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
    ] {
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat();
        std::fs::write(&path, bytes).unwrap();
        let error = Reader::open(&path).unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "{header}: {error}");
    }
}
