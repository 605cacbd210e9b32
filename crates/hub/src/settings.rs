//! Settings of the hub: endpoint, token, cache and limits, by default from the environment variables that the
//! hub's own tools read.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ballast_files::regular::read_regular_text;
use ballast_files::{Error, Result};

use crate::address::Url;

/// The public hub.
const ENDPOINT: &str = "https://huggingface.co";

/// Settings of the hub.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Address of the hub, without a slash at the end.
    pub endpoint: String,
    /// Access token; sent to the endpoint's host only.
    pub token: Option<Token>,
    /// Folder of the cache, in the hub's own layout.
    pub cache: PathBuf,
    /// If true, no request is made; only the cache is read.
    pub offline: bool,
    /// If true, proxies are taken from the environment.
    pub proxy: bool,
    /// Certificates (PEM) to trust in place of the built-in ones.
    pub certificates: Option<PathBuf>,
    /// Limits of requests.
    pub limits: Limits,
}

/// Limits of requests.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Time to connect.
    pub connect: Duration,
    /// Time without a byte after which an answer has stalled.
    pub stall: Duration,
    /// Number of attempts in a row that may fail.
    pub attempts: u32,
    /// Wait after the first failure; doubles after each.
    pub first_wait: Duration,
    /// Longest wait that a server can ask for.
    pub longest_wait: Duration,
    /// Number of requests at a time.
    pub parallel: usize,
    /// Number of bytes that one request of a download asks for.
    pub range_bytes: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connect: Duration::from_secs(15),
            stall: Duration::from_secs(30),
            attempts: 5,
            first_wait: Duration::from_millis(500),
            longest_wait: Duration::from_secs(300),
            parallel: 8,
            range_bytes: 8 << 20,
        }
    }
}

/// An access token. It has no readable form but the header of a request.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Checks a token; `place` says where it is from.
    pub fn new(text: &str, place: &str) -> Result<Option<Token>> {
        let text = text.trim();
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            let problem = format!("{place}: the token has characters that a header cannot hold");
            return Err(Error::Refused(problem));
        }
        Ok((!text.is_empty()).then(|| Token(text.to_string())))
    }

    pub(crate) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// Removes the token from a text of a server, which may have repeated it.
    pub(crate) fn remove_from(&self, text: &str) -> String {
        text.replace(&self.0, "***")
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(***)")
    }
}

impl Settings {
    /// Reads the environment: HF_ENDPOINT, HF_TOKEN, HF_TOKEN_PATH, HF_HUB_CACHE, HF_HOME, HF_HUB_OFFLINE and
    /// SSL_CERT_FILE; proxies when a connection is made.
    pub fn from_env() -> Result<Settings> {
        let home = hub_home();
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let endpoint = endpoint.trim_end_matches('/').to_string();
        if let Err(problem) = Url::parse(&endpoint) {
            return Err(Error::Refused(format!("HF_ENDPOINT: {problem}")));
        }
        let is_on = |value: String| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str());
        Ok(Settings {
            endpoint,
            token: token(&home)?,
            cache: path("HF_HUB_CACHE")
                .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
                .unwrap_or_else(|| home.join("hub")),
            offline: text("HF_HUB_OFFLINE").is_some_and(is_on),
            proxy: true,
            certificates: path("SSL_CERT_FILE"),
            limits: Limits::default(),
        })
    }
}

/// Returns a variable that is set and not empty.
fn text(name: &str) -> Option<String> {
    env::var(name).ok().map(|value| value.trim().to_string()).filter(|value| !value.is_empty())
}

fn path(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The folder of the hub's tools: HF_HOME, else `huggingface` in the user's cache.
fn hub_home() -> PathBuf {
    path("HF_HOME").unwrap_or_else(|| {
        let cache = path("XDG_CACHE_HOME")
            .unwrap_or_else(|| path("HOME").unwrap_or_else(|| PathBuf::from(".")).join(".cache"));
        cache.join("huggingface")
    })
}

fn token(home: &Path) -> Result<Option<Token>> {
    for name in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"] {
        if let Some(value) = text(name) {
            return Token::new(&value, name);
        }
    }
    let file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
    match read_regular_text(&file) {
        Ok(text) => Token::new(&text, &file.display().to_string()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(&file, "read")(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_never_printed() {
        let token = Token::new(" hf_secret\n", "HF_TOKEN").unwrap().unwrap();
        assert_eq!(format!("{token:?}"), "Token(***)");
        assert_eq!(token.header(), "Bearer hf_secret");
        assert_eq!(token.remove_from("who is hf_secret?"), "who is ***?");
        assert_eq!(Token::new("\n", "x").unwrap(), None);
        let error = Token::new("hf_se\ncret", "HF_TOKEN").unwrap_err().to_string();
        assert!(error.starts_with("HF_TOKEN:") && !error.contains("cret"), "{error}");
    }
}
