//! Parses arbitrary text as an address, a redirect and a `Content-Range`. An accepted address survives a round
//! trip and its paths stay inside their repository; a redirect never leaves https; a part lies in its file.

#![no_main]

use std::path::{Component, Path};

use ballast_hub::address::{Address, Url};
use ballast_hub::range::ContentRange;
use libfuzzer_sys::fuzz_target;

fn is_inside(path: &str) -> bool {
    Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

fuzz_target!(|text: &str| {
    match Address::parse(text) {
        Ok(Address::Repo(repo)) => {
            assert!(is_inside(&repo.path) && is_inside(repo.revision()), "{repo:?}");
            assert_eq!(repo.repo.split('/').count(), 2);
            assert_eq!(Address::parse(&repo.to_string()).ok(), Some(Address::Repo(repo)));
        }
        Ok(Address::Url(url)) => assert_eq!(Url::parse(&url.to_request()), Ok(url)),
        Err(_) => {}
    }
    let base = Url::parse("https://host/a/b").expect("a constant");
    if let Ok(target) = base.join(text) {
        assert!(target.to_request().starts_with("https://"), "{target}");
    }
    if let Ok(ContentRange { part: Some((first, length)), total: Some(total) }) = ContentRange::parse(text) {
        assert!(length > 0 && first.checked_add(length).is_some_and(|end| end <= total));
    }
});
