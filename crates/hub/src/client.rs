//! Requests: redirects, the token, retries, and counts.
//!
//! Redirects are followed here and not by the HTTP library, because the token may go to the endpoint's host
//! only, and because the answer of the endpoint states the identity of a file that another host sends.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::Read;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use ballast_files::regular::read_regular;
use ballast_files::{Error, Result};
use ureq::http::HeaderMap;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, BodyReader, Proxy};

use crate::Traffic;
use crate::address::Url;
use crate::range::ContentRange;
use crate::settings::{Limits, Settings};

/// Number of redirects that are followed.
const MOST_REDIRECTS: usize = 8;

/// Number of characters of a server's own message that an error repeats.
const MESSAGE_CHARACTERS: usize = 200;

/// Waits from this time on are announced.
const NOTICED: Duration = Duration::from_secs(2);

/// Functions of the program that a waiting request calls.
pub struct Waiting {
    /// Says that a wait begins: how long, and why.
    pub announce: fn(&str),
    /// Returns true if the work should stop.
    pub cancelled: fn() -> bool,
}

static WAITING: OnceLock<Waiting> = OnceLock::new();

/// Sets the functions that a waiting request calls; the first call counts.
pub fn set_waiting(waiting: Waiting) {
    let _ = WAITING.set(waiting);
}

/// A client of one hub.
pub(crate) struct Client {
    agent: Agent,
    endpoint: Url,
    pub(super) settings: Settings,
    pub(super) traffic: Arc<Traffic>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({})", self.endpoint)
    }
}

/// The start of an answer with data; its body is still to be read.
pub(super) struct Answer {
    /// 200 or 206.
    pub(super) status: u16,
    /// URL that answered, after redirects.
    pub(super) url: Url,
    /// Identity of the file by the host that answered.
    pub(super) etag: Option<String>,
    /// Identity of the file by the endpoint, which sent us to another host.
    pub(super) linked_etag: Option<String>,
    /// Commit that the file is from.
    pub(super) commit: Option<String>,
    /// Length of the body.
    pub(super) length: Option<u64>,
    /// Part of the file that the body is.
    pub(super) range: Option<ContentRange>,
    body: BodyReader<'static>,
    traffic: Arc<Traffic>,
}

/// A request that failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) problem: String,
    pub(super) status: Option<u16>,
    /// Part of the file by an answer 416.
    pub(super) range: Option<ContentRange>,
    retry: Retry,
}

#[derive(Debug)]
enum Retry {
    Never,
    /// The user does not want to wait.
    Cancelled,
    Soon,
    After(Duration),
}

impl Failure {
    /// A failure that another attempt would repeat.
    pub(super) fn lasting(problem: impl Into<String>) -> Failure {
        Failure { problem: problem.into(), status: None, range: None, retry: Retry::Never }
    }

    /// A failure that another attempt may not have.
    pub(super) fn passing(problem: impl Into<String>) -> Failure {
        Failure { retry: Retry::Soon, ..Failure::lasting(problem) }
    }

    /// Returns true if no server answered.
    pub(super) fn is_unreachable(&self) -> bool {
        self.status.is_none() && !matches!(self.retry, Retry::Never | Retry::Cancelled)
    }

    pub(super) fn error(self, address: &str) -> Error {
        match self.retry {
            Retry::Cancelled => Error::Interrupted,
            _ => Error::Hub { address: address.into(), problem: self.problem },
        }
    }
}

/// Counts failures in a row, and waits after each.
pub(super) struct Patience<'a> {
    limits: &'a Limits,
    failures: u32,
}

impl Patience<'_> {
    /// Waits before another attempt; returns the failure if there should be none.
    pub(super) fn wait(&mut self, failure: Failure) -> Result<(), Failure> {
        self.failures += 1;
        let back_off = self.limits.first_wait.saturating_mul(1 << (self.failures - 1).min(16));
        let wait = match failure.retry {
            Retry::Never | Retry::Cancelled => return Err(failure),
            Retry::Soon => jittered(back_off.min(self.limits.longest_wait)),
            Retry::After(wait) if wait > self.limits.longest_wait => {
                let problem = format!("{}; the server asks to wait {} s", failure.problem, wait.as_secs());
                return Err(Failure { problem, ..failure });
            }
            Retry::After(wait) => wait,
        };
        if self.failures >= self.limits.attempts {
            let problem = format!("{} ({} attempts)", failure.problem, self.failures);
            return Err(Failure { problem, ..failure });
        }
        if sleep(wait, &failure.problem) {
            return Err(Failure { retry: Retry::Cancelled, ..failure });
        }
        Ok(())
    }

    /// Forgets earlier failures, after an attempt that brought data.
    pub(super) fn renew(&mut self) {
        self.failures = 0;
    }
}

/// Sleeps, and says why if it takes long. Returns true if the work should stop.
fn sleep(wait: Duration, why: &str) -> bool {
    let waiting = WAITING.get();
    if let Some(waiting) = waiting.filter(|_| wait >= NOTICED) {
        (waiting.announce)(&format!("waiting {} s: {why}", wait.as_secs()));
    }
    let end = Instant::now() + wait;
    loop {
        if waiting.is_some_and(|waiting| (waiting.cancelled)()) {
            return true;
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        thread::sleep(left.min(Duration::from_millis(100)));
    }
}

/// Returns between half of a time and all of it, so that clients do not come back all at once.
fn jittered(time: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish() % 1024;
    time / 2 + (time / 2048) * random as u32
}

impl Client {
    pub(crate) fn new(settings: Settings) -> Result<Client> {
        let endpoint =
            Url::parse(&settings.endpoint).map_err(|p| Error::Refused(format!("HF_ENDPOINT: {p}")))?;
        let limits = &settings.limits;
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(if settings.proxy { Proxy::try_from_env() } else { None })
            .timeout_connect(Some(limits.connect))
            .timeout_recv_response(Some(limits.stall))
            .timeout_per_read(Some(limits.stall))
            .user_agent(concat!("ballast/", env!("CARGO_PKG_VERSION")))
            .accept("*/*")
            .accept_encoding("identity")
            .max_idle_connections(4 * limits.parallel)
            .max_idle_connections_per_host(2 * limits.parallel)
            .tls_config(tls(&settings)?)
            .build();
        let agent = config.into();
        Ok(Client { agent, endpoint, settings, traffic: Arc::default() })
    }

    pub(super) fn patience(&self) -> Patience<'_> {
        Patience { limits: &self.settings.limits, failures: 0 }
    }

    /// Asks for a file, or for `length` bytes of it from byte `at`. Follows redirects, makes one attempt.
    pub(super) fn send(&self, url: &Url, range: Option<(u64, u64)>) -> Result<Answer, Failure> {
        let (mut url, mut linked_etag, mut commit) = (url.clone(), None, None);
        for _ in 0..=MOST_REDIRECTS {
            let response = self.exchange(&url, range)?;
            let status = response.status().as_u16();
            let headers = response.headers().clone();
            if self.endpoint.same_origin(&url) {
                linked_etag = linked_etag.or(etag(&headers, "x-linked-etag"));
                commit = commit.or(text(&headers, "x-repo-commit").map(str::to_string));
            }
            if [301, 302, 303, 307, 308].contains(&status) {
                let location = text(&headers, "location").unwrap_or_default();
                let target = url
                    .join(location)
                    .map_err(|problem| Failure::lasting(format!("redirect of {url} refused: {problem}")))?;
                // An unread body would close the connection.
                let _ = std::io::copy(
                    &mut response.into_body().into_reader().take(1 << 16),
                    &mut std::io::sink(),
                );
                url = target;
                continue;
            }
            if status != 200 && status != 206 {
                return Err(self.refusal(status, &url, &headers));
            }
            if let Some(encoding) = text(&headers, "content-encoding").filter(|e| *e != "identity") {
                let problem = format!("the server sent {encoding:?} data although identity was asked for");
                return Err(Failure::lasting(problem));
            }
            let range = text(&headers, "content-range").map(ContentRange::parse).transpose();
            return Ok(Answer {
                status,
                etag: etag(&headers, "etag"),
                linked_etag,
                commit,
                length: text(&headers, "content-length").and_then(|length| length.parse().ok()),
                range: range.map_err(Failure::lasting)?,
                url,
                body: response.into_body().into_reader(),
                traffic: self.traffic.clone(),
            });
        }
        Err(Failure::lasting(format!("more than {MOST_REDIRECTS} redirects")))
    }

    /// Sends one request, with the token if the URL is the endpoint's.
    fn exchange(
        &self,
        url: &Url,
        range: Option<(u64, u64)>,
    ) -> Result<ureq::http::Response<ureq::Body>, Failure> {
        let mut request = self.agent.get(url.to_request());
        if let Some((at, length)) = range {
            request = request.header("range", ContentRange::request(at, length));
        }
        if let Some(token) = self.settings.token.as_ref().filter(|_| self.endpoint.same_origin(url)) {
            request = request.header("authorization", token.header());
        }
        self.traffic.add_request();
        request.call().map_err(|error| {
            let problem = format!("no answer from {}: {error}", url.origin());
            match error {
                ureq::Error::BadUri(_)
                | ureq::Error::Http(_)
                | ureq::Error::InvalidProxyUrl
                | ureq::Error::Tls(_)
                | ureq::Error::Rustls(_)
                | ureq::Error::Pem(_) => Failure::lasting(problem),
                _ => Failure::passing(problem),
            }
        })
    }

    /// Says what a status means and what to do.
    fn refusal(&self, status: u16, url: &Url, headers: &HeaderMap) -> Failure {
        let here = self.endpoint.same_origin(url);
        let advice = match (status, here, &self.settings.token) {
            (401, true, None) => {
                "not found, or a token is needed: set HF_TOKEN or log in with the hub's tool"
            }
            (401, true, Some(_)) => "the server did not accept the token",
            (403, true, None) => {
                "access is restricted: accept the terms on the model's page, and set HF_TOKEN"
            }
            (403, true, Some(_)) => "the token has no access: have the model's terms been accepted?",
            (401 | 403, false, _) => "the server denies access",
            (404 | 410, ..) => "not found",
            (416, ..) => "the file is shorter than expected: has it been changed?",
            (429, ..) => "too many requests",
            (500..=599, ..) => "the server has a problem",
            _ => "not an answer that was expected",
        };
        let mut problem = format!("{status} from {}: {advice}", url.origin());
        if let Some(message) = text(headers, "x-error-message") {
            let message: String = message.chars().take(MESSAGE_CHARACTERS).collect();
            problem += &format!(" ({})", self.without_token(&message));
        }
        let seconds = text(headers, "retry-after").and_then(|value| value.trim().parse().ok());
        let retry = match (status, seconds) {
            (408 | 429 | 500 | 502 | 503 | 504, Some(seconds)) => Retry::After(Duration::from_secs(seconds)),
            (408 | 429 | 500 | 502 | 503 | 504, None) => Retry::Soon,
            _ => Retry::Never,
        };
        let range = text(headers, "content-range").and_then(|value| ContentRange::parse(value).ok());
        Failure { problem, status: Some(status), range, retry }
    }

    fn without_token(&self, text: &str) -> String {
        match &self.settings.token {
            Some(token) => token.remove_from(text),
            None => text.to_string(),
        }
    }

    /// Reads a whole file of at most `most` bytes.
    pub(super) fn read_all(&self, url: &Url, most: u64) -> Result<(Vec<u8>, Answer), Failure> {
        let mut patience = self.patience();
        loop {
            let attempt = || -> Result<_, Failure> {
                let mut answer = self.send(url, None)?;
                if answer.length.is_some_and(|length| length > most) {
                    return Err(Failure::lasting(format!("more than {most} bytes")));
                }
                let bytes = answer.read_to_end(most)?;
                Ok((bytes, answer))
            };
            match attempt() {
                Ok(read) => return Ok(read),
                Err(failure) => patience.wait(failure)?,
            }
        }
    }
}

impl Answer {
    /// Reads the next bytes of the body; 0 at its end.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Failure> {
        let read = self
            .body
            .read(buffer)
            .map_err(|e| Failure::passing(format!("the data from {} ended early: {e}", self.url.origin())))?;
        self.traffic.add_bytes(read as u64);
        Ok(read)
    }

    /// Fills `buffer`, from `*done` on, which counts the bytes that it holds.
    pub(super) fn fill(&mut self, buffer: &mut [u8], done: &mut usize) -> Result<(), Failure> {
        while *done < buffer.len() {
            match self.read(&mut buffer[*done..])? {
                0 => {
                    return Err(Failure::passing(format!("the data from {} ended early", self.url.origin())));
                }
                read => *done += read,
            }
        }
        Ok(())
    }

    /// Reads to the end of the body, which also frees the connection for the next request.
    pub(super) fn expect_end(&mut self) -> Result<(), Failure> {
        match self.read(&mut [0])? {
            0 => Ok(()),
            _ => Err(Failure::lasting("the server sent more data than it announced")),
        }
    }

    pub(super) fn read_to_end(&mut self, most: u64) -> Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        let mut piece = [0; 1 << 16];
        loop {
            match self.read(&mut piece)? {
                0 => break,
                read => bytes.extend_from_slice(&piece[..read]),
            }
            if bytes.len() as u64 > most {
                return Err(Failure::lasting(format!("more than {most} bytes")));
            }
        }
        if self.length.is_some_and(|length| length != bytes.len() as u64) {
            return Err(Failure::passing("the data is not as long as announced"));
        }
        Ok(bytes)
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok()).filter(|value| !value.is_empty())
}

/// Returns an entity tag without its quotes and its mark of weakness.
fn etag(headers: &HeaderMap, name: &str) -> Option<String> {
    let value = text(headers, name)?;
    let value = value.strip_prefix("W/").unwrap_or(value).trim_matches('"');
    (!value.is_empty()).then(|| value.to_string())
}

/// Returns the certificates to trust: those of Mozilla, or the file's.
fn tls(settings: &Settings) -> Result<TlsConfig> {
    let Some(file) = &settings.certificates else { return Ok(TlsConfig::default()) };
    let pem = read_regular(file).map_err(Error::io(file, "read"))?;
    let mut trusted = Vec::new();
    for item in parse_pem(&pem) {
        match item {
            Ok(PemItem::Certificate(certificate)) => trusted.push(certificate),
            Ok(_) => {}
            Err(error) => {
                let problem = format!("SSL_CERT_FILE {}: not PEM certificates: {error}", file.display());
                return Err(Error::Refused(problem));
            }
        }
    }
    Ok(TlsConfig::builder().root_certs(RootCerts::new_with_certs(&trusted)).build())
}
