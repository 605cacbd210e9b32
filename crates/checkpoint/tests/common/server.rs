//! A hub of our own on the loopback, and a second host that it redirects to.
#![allow(dead_code)] // not every program uses every part

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A request as it was received.
#[derive(Clone, Debug)]
pub struct Request {
    /// Path and query.
    pub path: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The first and the last byte of the range.
    pub fn range(&self) -> Option<(u64, u64)> {
        let (first, last) = self.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    }
}

/// The body of an answer.
pub enum Body {
    Bytes(Vec<u8>),
    /// Bytes of a file, from a byte on.
    File(PathBuf, u64, u64),
}

/// An answer.
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Body,
    /// The connection is closed after this many bytes of the body.
    pub cut_after: Option<u64>,
    /// Nothing is sent after the first byte of the body until the client hangs up.
    pub stall: bool,
}

impl Response {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Response {
        let body = body.into();
        let length = body.len();
        Response { status, headers: Vec::new(), body: Body::Bytes(body), cut_after: None, stall: false }
            .with("content-length", &length.to_string())
    }

    /// Sets a header, in place of an earlier one.
    pub fn with(mut self, name: &str, value: &str) -> Response {
        self.headers.retain(|(n, _)| n != name);
        self.headers.push((name.into(), value.into()));
        self
    }

    pub fn cut_after(self, bytes: u64) -> Response {
        Response { cut_after: Some(bytes), ..self }
    }

    pub fn stall(self) -> Response {
        Response { stall: true, ..self }
    }

    /// A file, or the range of it that was asked for.
    pub fn file(request: &Request, path: &Path, etag: &str) -> Response {
        let total = path.metadata().unwrap().len();
        let (status, at, length) = match request.range() {
            Some((first, _)) if first >= total => {
                return Response::new(416, "").with("content-range", &format!("bytes */{total}"));
            }
            Some((first, last)) => (206, first, last.min(total - 1) - first + 1),
            None => (200, 0, total),
        };
        let body = Body::File(path.into(), at, length);
        let response = Response { status, headers: Vec::new(), body, cut_after: None, stall: false }
            .with("content-length", &length.to_string())
            .with("etag", &format!("\"{etag}\""));
        match status {
            206 => response.with("content-range", &format!("bytes {at}-{}/{total}", at + length - 1)),
            _ => response,
        }
    }

    fn send(self, stream: &mut TcpStream) -> std::io::Result<bool> {
        let mut head = format!("HTTP/1.1 {} X\r\n", self.status);
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        stream.write_all((head + "\r\n").as_bytes())?;
        let (mut body, length): (Box<dyn Read>, u64) = match self.body {
            Body::Bytes(bytes) => {
                let length = bytes.len() as u64;
                (Box::new(std::io::Cursor::new(bytes)), length)
            }
            Body::File(path, at, length) => {
                let mut file = File::open(path)?;
                file.seek(SeekFrom::Start(at))?;
                (Box::new(file), length)
            }
        };
        if self.stall {
            std::io::copy(&mut (&mut body).take(1), stream)?;
            stream.read_to_end(&mut Vec::new())?;
            return Ok(false);
        }
        let sent = self.cut_after.unwrap_or(length).min(length);
        std::io::copy(&mut body.take(sent), stream)?;
        Ok(sent == length)
    }
}

type Handler = dyn Fn(&Request) -> Response + Send + Sync;

/// A server; its threads end with the process.
pub struct Server {
    pub address: SocketAddr,
    log: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub fn start(handler: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (log, handler): (Arc<Mutex<Vec<Request>>>, Arc<Handler>) = (Arc::default(), Arc::new(handler));
        let kept = log.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, handler) = (kept.clone(), handler.clone());
                std::thread::spawn(move || serve(stream, &log, &*handler));
            }
        });
        Server { address, log }
    }

    /// Returns the requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.log.lock().unwrap().clone()
    }
}

fn serve(stream: TcpStream, log: &Mutex<Vec<Request>>, handler: &Handler) -> Option<()> {
    stream.set_nodelay(true).ok()?;
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut writer = stream;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
        let path = line.split(' ').nth(1)?.to_string();
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.push((name.to_lowercase(), value.to_string()));
        }
        let request = Request { path, headers };
        log.lock().unwrap().push(request.clone());
        handler(&request).send(&mut writer).ok().filter(|whole| *whole)?;
    }
}

/// Replaces the answer to a request, if it returns one.
pub type Fault = Box<dyn FnMut(&Request) -> Option<Response> + Send>;

/// A hub with one model, whose large files are on another host.
pub struct FakeHub {
    pub hub: Server,
    pub cdn: Server,
    fault: Arc<Mutex<Option<Fault>>>,
    /// Milliseconds before every answer.
    delay: Arc<AtomicU64>,
}

pub const REPO: &str = "org/model";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl FakeHub {
    /// Serves the files of a folder. `etag` gives the identity of a file.
    pub fn start(folder: &Path, etag: fn(&Path) -> String) -> FakeHub {
        let fault: Arc<Mutex<Option<Fault>>> = Arc::default();
        let (in_hub, in_cdn) = (fault.clone(), fault.clone());
        let delay: Arc<AtomicU64> = Arc::default();
        let (of_hub, of_cdn) = (delay.clone(), delay.clone());
        let wait = |delay: &AtomicU64| {
            std::thread::sleep(Duration::from_millis(delay.load(Ordering::Relaxed)));
        };
        let root = folder.to_path_buf();
        let cdn = Server::start(move |request| {
            wait(&of_cdn);
            if let Some(response) = in_cdn.lock().unwrap().as_mut().and_then(|fault| fault(request)) {
                return response;
            }
            let name = request.path.strip_prefix("/cdn/").unwrap().split('?').next().unwrap();
            Response::file(request, &root.join(name), &format!("cdn-{}", etag(&root.join(name))))
        });
        let (root, port) = (folder.to_path_buf(), cdn.address.port());
        let hub = Server::start(move |request| {
            wait(&of_hub);
            if let Some(response) = in_hub.lock().unwrap().as_mut().and_then(|fault| fault(request)) {
                return response;
            }
            answer(request, &root, port, etag)
        });
        FakeHub { hub, cdn, fault, delay }
    }

    /// Delays every answer, as the round trip of a network does.
    pub fn set_delay(&self, delay: Duration) {
        self.delay.store(delay.as_millis() as u64, Ordering::Relaxed);
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.hub.address)
    }

    pub fn set_fault(&self, fault: impl FnMut(&Request) -> Option<Response> + Send + 'static) {
        *self.fault.lock().unwrap() = Some(Box::new(fault));
    }

    /// Returns the number of requests to both hosts.
    pub fn requests(&self) -> usize {
        self.hub.requests().len() + self.cdn.requests().len()
    }
}

fn answer(request: &Request, root: &Path, cdn: u16, etag: fn(&Path) -> String) -> Response {
    let path = request.path.split('?').next().unwrap();
    if let Some(revision) = path.strip_prefix(&format!("/api/models/{REPO}/revision/")) {
        if !["main", "v1", COMMIT].contains(&revision) {
            return Response::new(404, "").with("x-error-message", "Invalid rev id");
        }
        let mut names: Vec<String> = std::fs::read_dir(root)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let siblings: Vec<String> =
            names.iter().map(|name| format!("{{\"rfilename\": \"{name}\"}}")).collect();
        let text = format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [{}]}}", siblings.join(", "));
        return Response::new(200, text);
    }
    let Some(name) = path.strip_prefix(&format!("/{REPO}/resolve/{COMMIT}/")) else {
        return Response::new(404, "").with("x-error-message", "Repository not found");
    };
    let file = root.join(name);
    if !file.is_file() {
        return Response::new(404, "").with("x-error-message", "Entry not found");
    }
    if name.ends_with(".safetensors") {
        return Response::new(302, "Found")
            .with("location", &format!("http://localhost:{cdn}/cdn/{name}?signature=abc"))
            .with("x-linked-etag", &format!("\"{}\"", etag(&file)))
            .with("x-repo-commit", COMMIT);
    }
    Response::file(request, &file, &etag(&file)).with("x-repo-commit", COMMIT)
}

/// An identity that is the file's name.
pub fn name_etag(path: &Path) -> String {
    format!("etag-of-{}", path.file_name().unwrap().to_string_lossy())
}
