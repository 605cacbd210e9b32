//! Addresses: `hf://ORG/NAME[@REVISION][/PATH]`, and URLs.

use std::fmt;

use ballast_files::{Error, Result};

/// A checkpoint that is not on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `hf://ORG/NAME[@REVISION][/PATH]`
    Repo(RepoAddress),
    /// `https://...`
    Url(Url),
}

/// A repository of a hub, a revision of it, and a path inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoAddress {
    /// `ORG/NAME`
    pub repo: String,
    /// Branch, tag or commit; `None` for the branch `main`.
    pub revision: Option<String>,
    /// File or folder inside the repository; empty for all of it.
    pub path: String,
}

impl Address {
    /// Parses an address.
    pub fn parse(text: &str) -> Result<Address> {
        let fail = |problem: &str| {
            Err(Error::Refused(format!(
                "{}: {problem}; expected hf://ORG/NAME[@REVISION][/PATH] or https://HOST/FILE.safetensors",
                shown(text)
            )))
        };
        match text.strip_prefix("hf:") {
            Some(rest) => match RepoAddress::parse(rest.trim_start_matches('/')) {
                Ok(address) => Ok(Address::Repo(address)),
                Err(problem) => fail(problem),
            },
            None => match Url::parse(text) {
                Ok(url) => Ok(Address::Url(url)),
                Err(problem) => fail(problem),
            },
        }
    }
}

/// Returns an address as it may be printed: without the query of a URL, which may be a signature, and without
/// a user and password.
fn shown(text: &str) -> String {
    let text = text.split(['?', '#']).next().unwrap_or(text);
    match text.split_once("://") {
        Some((scheme, rest)) if !scheme.starts_with("hf") => {
            let host = rest.split('/').next().unwrap_or(rest);
            let hidden = host.rsplit_once('@').map_or(rest, |(user, _)| &rest[user.len() + 1..]);
            format!("{scheme}://{hidden}")
        }
        _ => text.to_string(),
    }
}

impl RepoAddress {
    fn parse(text: &str) -> Result<RepoAddress, &'static str> {
        let (org, rest) = text.split_once('/').ok_or("the name of a repository is ORG/NAME")?;
        if ["datasets", "spaces"].contains(&org) {
            return Err("only models can be opened");
        }
        let end = rest.find(['@', '/']).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        if ![org, name].iter().all(|part| is_name(part)) {
            return Err("not the name of a repository");
        }
        let (revision, path) = match rest.strip_prefix('@') {
            Some(rest) => {
                let (revision, path) = split_revision(rest);
                let revision = revision.replace("%2F", "/").replace("%2f", "/");
                if !is_path(&revision) || !revision.bytes().all(is_word) {
                    return Err("not a revision");
                }
                (Some(revision), path)
            }
            None => (None, rest),
        };
        let path = path.strip_prefix('/').unwrap_or(path).trim_end_matches('/');
        if !path.is_empty() && !is_path(path) {
            return Err("not a path inside a repository");
        }
        Ok(RepoAddress { repo: format!("{org}/{name}"), revision, path: path.to_string() })
    }

    /// Returns the revision.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// Returns the address of the same path at a commit.
    pub(crate) fn at(&self, commit: &str) -> RepoAddress {
        RepoAddress { revision: Some(commit.into()), ..self.clone() }
    }
}

impl fmt::Display for RepoAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hf://{}", self.repo)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{}", revision.replace('/', "%2F"))?;
        }
        if !self.path.is_empty() {
            write!(f, "/{}", self.path)?;
        }
        Ok(())
    }
}

/// Splits `REVISION[/PATH]`. A revision that contains slashes is written with %2F, but for `refs/pr/N` and
/// `refs/convert/NAME`, as in other tools.
fn split_revision(text: &str) -> (&str, &str) {
    let slashes = if ["refs/pr/", "refs/convert/"].iter().any(|p| text.starts_with(p)) { 2 } else { 0 };
    let end = text.match_indices('/').nth(slashes).map_or(text.len(), |(at, _)| at);
    text.split_at(end)
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._-/".contains(&byte)
}

/// The name of an owner or a repository. Two hyphens or two dots in a row are not allowed by the hub, and are
/// the separator in the names of its cache.
fn is_name(text: &str) -> bool {
    let characters = text.bytes().all(|byte| is_word(byte) && byte != b'/');
    !text.is_empty() && characters && text != "." && !text.contains("--") && !text.contains("..")
}

/// Returns true for a relative path that stays below its root and can be joined to a folder.
pub(crate) fn is_path(text: &str) -> bool {
    let plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    text.split('/').all(plain) && !text.chars().any(|c| c.is_control() || c == '\\')
}

/// Returns true for the name of a commit.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// An http or https URL. It is displayed without its query, which may be a signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    tls: bool,
    /// Host and port, in lower case.
    authority: String,
    /// Starts with a slash.
    path: String,
    query: Option<String>,
}

impl Url {
    /// Parses an absolute URL.
    pub fn parse(text: &str) -> Result<Url, &'static str> {
        let (scheme, rest) = text.split_once("://").ok_or("not an address")?;
        let tls = match scheme.to_ascii_lowercase().as_str() {
            "https" => true,
            "http" => false,
            _ => return Err("not an http or https address"),
        };
        if !rest.bytes().all(|byte| byte.is_ascii_graphic() && !b"\\\"<>".contains(&byte)) {
            return Err("a URL has ASCII characters without spaces only");
        }
        let rest = rest.split('#').next().unwrap_or(rest);
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, rest) = rest.split_at(end);
        if authority.contains('@') {
            return Err("a user and password in a URL are not supported");
        }
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
            _ => (authority, None),
        };
        if host.is_empty() || port.is_some_and(|port| port.parse::<u16>().is_err()) {
            return Err("the URL has no valid host");
        }
        let (path, query) = match rest.split_once('?') {
            Some((path, query)) => (path, Some(query.to_string())),
            None => (rest, None),
        };
        let path = if path.is_empty() { "/".to_string() } else { path.to_string() };
        Ok(Url { tls, authority: authority.to_ascii_lowercase(), path, query })
    }

    /// Returns the URL that a `Location` header of this one's answer names. One that leaves https is an error.
    pub fn join(&self, location: &str) -> Result<Url, &'static str> {
        let target = if location.contains("://") {
            Url::parse(location)?
        } else if location.starts_with("//") {
            Url::parse(&format!("{}:{location}", self.scheme()))?
        } else if location.starts_with('/') {
            Url::parse(&format!("{}://{}{location}", self.scheme(), self.authority))?
        } else {
            let folder = self.path.rsplit_once('/').map_or("", |(folder, _)| folder);
            Url::parse(&format!("{}://{}{folder}/{location}", self.scheme(), self.authority))?
        };
        if self.tls && !target.tls {
            return Err("it leads from https to http");
        }
        Ok(target)
    }

    /// Returns the URL of another file in the same folder, without a query.
    pub fn beside(&self, name: &str) -> Url {
        let folder = self.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        Url { path: format!("{folder}/{}", encode(name)), query: None, ..self.clone() }
    }

    /// Returns the name of the file.
    pub fn file_name(&self) -> &str {
        self.path.rsplit_once('/').map_or("", |(_, name)| name)
    }

    /// Returns true if both URLs have the same scheme, host and port.
    pub(crate) fn same_origin(&self, other: &Url) -> bool {
        self.tls == other.tls && self.host_and_port() == other.host_and_port()
    }

    /// Returns the whole URL, with its query.
    pub fn to_request(&self) -> String {
        let query = self.query.as_ref().map(|query| format!("?{query}")).unwrap_or_default();
        format!("{}://{}{}{query}", self.scheme(), self.authority, self.path)
    }

    /// Returns scheme, host and port, for errors.
    pub(crate) fn origin(&self) -> String {
        format!("{}://{}", self.scheme(), self.authority)
    }

    fn scheme(&self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }

    fn host_and_port(&self) -> (&str, u16) {
        let default = if self.tls { 443 } else { 80 };
        match self.authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().unwrap_or(default)),
            _ => (&self.authority, default),
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme(), self.authority, self.path)
    }
}

/// Percent-encodes a path; slashes stay.
pub(crate) fn encode(path: &str) -> String {
    let mut text = String::new();
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            text.push(byte as char);
        } else {
            text += &format!("%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn repo(text: &str) -> Option<(String, Option<String>, String)> {
        match Address::parse(text) {
            Ok(Address::Repo(r)) => Some((r.repo, r.revision, r.path)),
            _ => None,
        }
    }

    #[test]
    fn an_address_has_a_repository_a_revision_and_a_path() {
        let some = |repo: &str, revision: Option<&str>, path: &str| {
            Some((repo.to_string(), revision.map(str::to_string), path.to_string()))
        };
        assert_eq!(repo("hf://a/b"), some("a/b", None, ""));
        assert_eq!(repo("hf://a/b/"), some("a/b", None, ""));
        assert_eq!(repo("hf:/a/b"), some("a/b", None, ""), "pathlib joins slashes");
        assert_eq!(repo("hf://a/b@v1.0"), some("a/b", Some("v1.0"), ""));
        assert_eq!(repo("hf://a/b@v1/x/y.safetensors"), some("a/b", Some("v1"), "x/y.safetensors"));
        assert_eq!(repo("hf://a/b@refs/pr/3/x"), some("a/b", Some("refs/pr/3"), "x"));
        assert_eq!(repo("hf://a/b@feature%2Fx/y"), some("a/b", Some("feature/x"), "y"));
        assert_eq!(repo("hf://a/b/x@1.safetensors"), some("a/b", None, "x@1.safetensors"));
    }

    #[test]
    fn addresses_that_lead_elsewhere_are_refused() {
        for text in [
            "hf://a",
            "hf://",
            "hf:///",
            "hf://a/",
            "hf://a/b@",
            "hf://a/b@..",
            "hf://a/b@x%2F..%2Fy",
            "hf://../b",
            "hf://a/b/../c",
            "hf://a/b/c//d",
            "hf://a/b//c",
            "hf://a/b@refs///pr/3",
            "hf://a--b/c",
            "hf://datasets/a/b",
            "hf://a/b@x y",
            "ftp://a/b",
            "https://",
            "https://:80/x",
            "https://h:99999/x",
            "https://h/a b",
            "https://user:secret@h/x",
        ] {
            let error = Address::parse(text).unwrap_err().to_string();
            assert!(error.contains("expected hf://ORG/NAME"), "{text}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_redirect_is_resolved_against_the_url_before_it() {
        let url = Url::parse("https://Hub.example/a/b?c=1").unwrap();
        let to = |location| url.join(location).map(|u| u.to_request());
        assert_eq!(to("/x?y"), Ok("https://hub.example/x?y".into()));
        assert_eq!(to("x"), Ok("https://hub.example/a/x".into()));
        assert_eq!(to("//cdn.example/x"), Ok("https://cdn.example/x".into()));
        assert_eq!(to("https://cdn.example:444/x"), Ok("https://cdn.example:444/x".into()));
        assert!(to("http://hub.example/x").is_err());
        assert!(to("file:///etc/passwd").is_err());
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let same = |a: &str, b: &str| Url::parse(a).unwrap().same_origin(&Url::parse(b).unwrap());
        assert!(same("https://h/x", "https://H:443/y"));
        assert!(!same("https://h/x", "http://h/x"));
        assert!(!same("https://h/x", "https://h:444/x"));
        assert!(!same("https://h/x", "https://h.evil.example/x"));
        assert!(same("http://[::1]:80/x", "http://[::1]/x"));
        assert!(!same("http://127.0.0.1:80/x", "http://localhost/x"));
    }

    #[test]
    fn a_url_is_shown_without_its_query() {
        let url = Url::parse("https://h/x.safetensors?signature=secret#y").unwrap();
        assert_eq!(url.to_string(), "https://h/x.safetensors");
        assert_eq!(url.beside("config.json").to_request(), "https://h/config.json");
        assert_eq!(url.file_name(), "x.safetensors");
        assert_eq!(encode("a b/ü%"), "a%20b/%C3%BC%25");
    }

    proptest! {
        #[test]
        fn any_text_is_an_address_or_an_error(text in ".{0,40}", prefix in 0usize..4) {
            let prefix = ["", "hf://", "hf://a/b@", "https://h/"][prefix];
            if let Ok(Address::Repo(found)) = Address::parse(&format!("{prefix}{text}")) {
                prop_assert!(found.path.is_empty() || is_path(&found.path));
                prop_assert!(is_path(found.revision()));
                prop_assert_eq!(Address::parse(&found.to_string()).unwrap(), Address::Repo(found));
            }
        }

        #[test]
        fn any_location_is_a_url_or_an_error(location in ".{0,40}") {
            let url = Url::parse("https://h:8/a/b").unwrap();
            if let Ok(target) = url.join(&location) {
                prop_assert_eq!(Url::parse(&target.to_request()).unwrap(), target);
            }
        }
    }
}
