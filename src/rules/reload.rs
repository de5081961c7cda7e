//! Where rule files come from, the watch over them, and the rules in force. A load is all or nothing: if any file is
//! bad, the rules that were in force stay.

use std::{
    collections::BTreeMap,
    fmt, fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use arc_swap::{ArcSwapOption, Guard};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use parking_lot::Mutex;

use super::{
    RuleSet,
    compile::{self, Compiled, compile},
    file::SourceFile,
    problem::render,
};
use crate::metrics::Page;

/// Where rule files are.
#[derive(Clone, Debug)]
pub enum Source {
    /// The reference's layout below a runtime root.
    Runtime {
        /// The root; may be a symlink that is swapped.
        root: PathBuf,
        /// Below the root.
        subdirectory: PathBuf,
        /// Below that, where the root is not watched; else the first part of the files' names.
        app_directory: PathBuf,
        /// Leave out what starts with a dot.
        ignore_dot_files: bool,
        /// Everything below root and subdirectory is read, and names are made of the whole path.
        watch_root: bool,
    },
    /// These files, and all files below these directories, without hidden ones and editors' leftovers.
    Paths(Vec<PathBuf>),
}

/// A file or directory that could not be read. The load fails for it: a rule must not vanish quietly.
#[derive(Debug, thiserror::Error)]
#[error("can't read {}: {cause}", path.display())]
pub struct ReadError {
    path: PathBuf,
    cause: io::Error,
}

/// The rules in force and how the last load went; clones share them.
#[derive(Clone, Debug)]
pub struct Rules(Arc<Shared>);

/// What a load did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// New rules are in force.
    Loaded,
    /// The files are those of the last load, good or bad.
    Unchanged,
    /// Something is wrong with the files, and the rules in force stay.
    Failed,
}

/// How loading went so far.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// What was wrong with the last load; `None` if it was good.
    pub error: Option<String>,
    /// When the rules in force were loaded.
    pub loaded_at: Option<SystemTime>,
    /// Good loads.
    pub loads_ok: u64,
    /// Bad loads.
    pub loads_failed: u64,
}

/// Ends the watch when dropped.
#[derive(Debug)]
pub struct WatchGuard {
    stop: mpsc::Sender<Wake>,
}

struct Shared {
    source: Source,
    options: compile::Options,
    current: ArcSwapOption<RuleSet>,
    ok: AtomicU64,
    failed: AtomicU64,
    /// Also serialises loads.
    last: Mutex<Last>,
    on_change: Mutex<Vec<Box<dyn Fn() + Send + Sync>>>,
}

#[derive(Debug, Default)]
struct Last {
    /// Of the content that was loaded last; `None` if it could not be read.
    content: Option<u64>,
    error: Option<String>,
    loaded_at: Option<SystemTime>,
}

enum Wake {
    Changed,
    Stop,
}

/// A change is read so long after its last event: editors and kubelet write in several steps.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// And at the latest so long after its first one, however often files are touched.
const DEBOUNCE_AT_MOST: Duration = Duration::from_secs(2);
/// Events get lost (network file systems, overflowing queues), so files are looked at now and then all the same.
const POLL: Duration = Duration::from_secs(30);
/// The same while a directory is missing or can't be watched.
const POLL_UNWATCHED: Duration = Duration::from_secs(1);

// === impl Source ===

impl Source {
    /// Every file, sorted by name.
    pub fn read(&self) -> Result<Vec<SourceFile>, ReadError> {
        let mut files = BTreeMap::new();
        match self {
            Self::Paths(paths) => {
                for path in paths {
                    let name = |path: &Path| Some(path.display().to_string());
                    let keep = |name: &str| !is_leftover(name);
                    if metadata(path)?.is_dir() {
                        walk(path, &keep, &name, &mut files)?;
                    } else {
                        files.insert(path.display().to_string(), text(path)?);
                    }
                }
            }
            Self::Runtime {
                app_directory,
                ignore_dot_files,
                watch_root,
                ..
            } => {
                let Some(base) = self.base() else {
                    tracing::warn!(
                        "RUNTIME_SUBDIRECTORY is empty, so there are no rules: name the directory below \
                         RUNTIME_ROOT, or set RUNTIME_WATCH_ROOT=false, or use --config"
                    );
                    return Ok(Vec::new());
                };
                let app = app_directory.display().to_string().replace('/', ".");
                let prefix = format!("{app}.");
                let name = |path: &Path| {
                    let relative = path.strip_prefix(&base).unwrap_or(path);
                    let name = relative.display().to_string().replace('/', ".");
                    (!watch_root || name.starts_with(&prefix)).then_some(name)
                };
                // `..data` and its like are Kubernetes' own: what they hold is reached by the names beside them.
                let keep = |name: &str| {
                    !(name.starts_with("..") || *ignore_dot_files && name.starts_with('.'))
                };
                walk(&base, &keep, &name, &mut files)?;
            }
        }
        let files = files.into_iter();
        Ok(files
            .map(|(name, text)| SourceFile { name, text })
            .collect())
    }

    /// The directory that is read; `None` if there is none by the reference's rules.
    fn base(&self) -> Option<PathBuf> {
        let Self::Runtime {
            root,
            subdirectory,
            app_directory,
            watch_root,
            ..
        } = self
        else {
            return None;
        };
        if !watch_root {
            return Some(root.join(subdirectory).join(app_directory));
        }
        (!subdirectory.as_os_str().is_empty()).then(|| root.join(subdirectory))
    }

    /// What is watched: each with whether to look below it, too. Parents stand for what may be replaced as a whole.
    fn watched(&self) -> Vec<(PathBuf, RecursiveMode)> {
        let parent = |path: &Path| {
            let parent = path
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty());
            parent.map_or_else(|| PathBuf::from("."), Path::to_owned)
        };
        match self {
            Self::Runtime { root, .. } => {
                let mut watched = vec![(parent(root), RecursiveMode::NonRecursive)];
                watched.extend(self.base().map(|base| (base, RecursiveMode::Recursive)));
                watched
            }
            Self::Paths(paths) => paths
                .iter()
                .flat_map(|path| {
                    let below = path
                        .is_dir()
                        .then(|| (path.clone(), RecursiveMode::Recursive));
                    std::iter::once((parent(path), RecursiveMode::NonRecursive)).chain(below)
                })
                .collect(),
        }
    }
}

/// All files below `directory`. Symlinked files are read, symlinked directories are not entered.
fn walk(
    directory: &Path,
    keep: &dyn Fn(&str) -> bool,
    name: &dyn Fn(&Path) -> Option<String>,
    files: &mut BTreeMap<String, String>,
) -> Result<(), ReadError> {
    let failed = |cause| ReadError {
        path: directory.to_owned(),
        cause,
    };
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !keep(&entry.file_name().to_string_lossy()) {
            continue;
        }
        let path = entry.path();
        let kind = entry.file_type().map_err(failed)?;
        if kind.is_dir() {
            walk(&path, keep, name, files)?;
        } else if let Some(name) = name(&path)
            && metadata(&path)?.is_file()
        {
            files.insert(name, text(&path)?);
        }
    }
    Ok(())
}

fn metadata(path: &Path) -> Result<fs::Metadata, ReadError> {
    fs::metadata(path).map_err(|cause| ReadError {
        path: path.to_owned(),
        cause,
    })
}

fn text(path: &Path) -> Result<String, ReadError> {
    fs::read(path)
        .and_then(|bytes| {
            String::from_utf8(bytes).map_err(|error| {
                let at = error.utf8_error().valid_up_to();
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("it is not UTF-8 at byte {at}; save it as UTF-8"),
                )
            })
        })
        .map_err(|cause| ReadError {
            path: path.to_owned(),
            cause,
        })
}

/// Hidden files and what editors leave behind.
fn is_leftover(name: &str) -> bool {
    name.starts_with(['.', '#']) || name.ends_with(['~', '#']) || name.ends_with(".swp")
}

// === impl Rules ===

impl Rules {
    /// No rules yet, to be loaded from `source`.
    pub fn new(source: Source, options: compile::Options) -> Self {
        Self(Arc::new(Shared {
            source,
            options,
            current: ArcSwapOption::empty(),
            ok: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            last: Mutex::default(),
            on_change: Mutex::default(),
        }))
    }

    /// The rules in force; `None` until a first good load.
    pub fn current(&self) -> Guard<Option<Arc<RuleSet>>> {
        self.0.current.load()
    }

    /// How loading went so far.
    pub fn status(&self) -> Status {
        let last = self.0.last.lock();
        Status {
            error: last.error.clone(),
            loaded_at: last.loaded_at,
            loads_ok: self.0.ok.load(Relaxed),
            loads_failed: self.0.failed.load(Relaxed),
        }
    }

    /// Calls `f` whenever other rules came into force.
    pub fn on_change(&self, f: impl Fn() + Send + Sync + 'static) {
        self.0.on_change.lock().push(Box::new(f));
    }

    /// Reads the files and puts them in force.
    pub fn load(&self) -> Outcome {
        match self.0.source.read() {
            Ok(files) => self.replace(&files),
            Err(error) => {
                let error = error.to_string();
                let mut last = self.0.last.lock();
                if last.error.as_ref() == Some(&error) {
                    return Outcome::Unchanged;
                }
                last.content = None;
                self.failed(&mut last, error)
            }
        }
    }

    /// Puts these files in force, if they are good and not those of the last load.
    pub fn replace(&self, files: &[SourceFile]) -> Outcome {
        let mut last = self.0.last.lock();
        let content = content(files);
        if last.content == Some(content) {
            return Outcome::Unchanged;
        }
        last.content = Some(content);
        let previous = self.0.current.load_full();
        let Compiled { rules, warnings } = match compile(files, self.0.options, previous.as_deref())
        {
            Ok(compiled) => compiled,
            Err(problems) => {
                let error = render(&problems.0, files, false);
                return self.failed(&mut last, error);
            }
        };
        let (domains, count) = (
            rules.domains().count(),
            rules.domains().flat_map(|domain| domain.rules()).count(),
        );
        self.0.current.store(Some(Arc::new(rules)));
        last.error = None;
        last.loaded_at = Some(SystemTime::now());
        self.0.ok.fetch_add(1, Relaxed);
        drop(last);
        tracing::info!(
            files = files.len(),
            domains,
            rules = count,
            "new rules are in force"
        );
        if !warnings.is_empty() {
            tracing::warn!(
                "probably mistakes in the rules:\n{}",
                render(&warnings, files, false).trim_end()
            );
        }
        for f in self.0.on_change.lock().iter() {
            f();
        }
        Outcome::Loaded
    }

    /// Puts the numbers on the metrics page.
    pub fn export(&self, page: &mut Page<'_>) -> fmt::Result {
        let status = self.status();
        page.reference_one(
            "ratelimit_service_config_load_success",
            "Good loads of rules.",
            status.loads_ok,
        )?;
        page.reference_one(
            "ratelimit_service_config_load_error",
            "Bad loads of rules.",
            status.loads_failed,
        )?;
        let stale = if status.error.is_some() { 1.0 } else { 0.0 };
        page.gauge(
            "slidegate_rules_stale",
            "1 while the last load failed and older rules, or none, are in force.",
            stale,
        )?;
        let loaded_at = status
            .loaded_at
            .and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let seconds = loaded_at.map_or(0.0, |at| at.as_secs_f64());
        page.gauge(
            "slidegate_rules_loaded_timestamp_seconds",
            "When the rules in force were loaded.",
            seconds,
        )
    }

    fn failed(&self, last: &mut Last, error: String) -> Outcome {
        let in_force = if last.loaded_at.is_some() {
            "the rules in force stay"
        } else {
            "there are no rules yet"
        };
        tracing::error!("can't load the rules, {in_force}:\n{}", error.trim_end());
        last.error = Some(error);
        self.0.failed.fetch_add(1, Relaxed);
        Outcome::Failed
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

fn content(files: &[SourceFile]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for file in files {
        (&file.name, &file.text).hash(&mut hasher);
    }
    hasher.finish()
}

// === watching ===

/// Loads the rules again whenever their files change, on a thread of its own, until the guard is dropped.
pub fn watch(rules: Rules) -> WatchGuard {
    let (stop, wake) = mpsc::channel();
    let changed = stop.clone();
    let thread = thread::Builder::new().name("rules".to_owned());
    if let Err(error) = thread.spawn(move || keep_loading(&rules, &wake, &changed)) {
        tracing::error!(%error, "can't watch the rule files: changes take effect at the next start");
    }
    WatchGuard { stop }
}

fn keep_loading(rules: &Rules, wake: &mpsc::Receiver<Wake>, changed: &mpsc::Sender<Wake>) {
    let mut watcher = watcher(changed.clone());
    loop {
        // Anew each time: what was watched may have been replaced, and a missing directory may be there now.
        let is_watched = watcher
            .as_mut()
            .is_some_and(|watcher| watch_all(watcher, &rules.0.source));
        rules.load();
        let poll = if is_watched { POLL } else { POLL_UNWATCHED };
        match wake.recv_timeout(poll) {
            Ok(Wake::Changed) if settle(wake) => {}
            Ok(_) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if let Some(watcher) = watcher.as_mut() {
            unwatch_all(watcher, &rules.0.source);
        }
    }
}

/// Waits until it has been quiet for a while. `false` if the watch is over.
fn settle(wake: &mpsc::Receiver<Wake>) -> bool {
    let end = Instant::now() + DEBOUNCE_AT_MOST;
    while Instant::now() < end {
        match wake.recv_timeout(DEBOUNCE) {
            Ok(Wake::Changed) => {}
            Ok(Wake::Stop) => return false,
            Err(_) => break,
        }
    }
    true
}

fn watcher(changed: mpsc::Sender<Wake>) -> Option<RecommendedWatcher> {
    let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Our own reading is an event, too.
        let is_reading = matches!(&event, Ok(event) if matches!(event.kind, EventKind::Access(_)));
        if !is_reading {
            // Nobody listens any more when the watch is over.
            let _ = changed.send(Wake::Changed);
        }
    });
    watcher
        .inspect_err(
            |error| tracing::warn!(%error, "can't watch files, so they are looked at every second"),
        )
        .ok()
}

/// Whether everything is watched.
fn watch_all(watcher: &mut RecommendedWatcher, source: &Source) -> bool {
    let watched = source.watched();
    watched.iter().fold(true, |all, (path, mode)| {
        watcher.watch(path, *mode).is_ok() && all
    })
}

fn unwatch_all(watcher: &mut RecommendedWatcher, source: &Source) {
    for (path, _) in source.watched() {
        // It may be gone, or never have been watched.
        let _ = watcher.unwatch(&path);
    }
}

// === impl WatchGuard ===

impl Drop for WatchGuard {
    fn drop(&mut self) {
        // The thread may have ended already.
        let _ = self.stop.send(Wake::Stop);
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, sync::atomic::AtomicUsize};

    use tempfile::TempDir;

    use super::*;

    fn rule(requests: u32) -> String {
        domain("d", requests)
    }

    fn domain(name: &str, requests: u32) -> String {
        format!(
            "domain: {name}\ndescriptors:\n- {{key: k, rate_limit: {{unit: day, requests_per_unit: {requests}}}}}\n"
        )
    }

    fn put(directory: &Path, name: &str, text: &str) {
        let path = directory.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn runtime(root: &Path, watch_root: bool, ignore_dot_files: bool) -> Source {
        Source::Runtime {
            root: root.to_owned(),
            subdirectory: "sub".into(),
            app_directory: "config".into(),
            ignore_dot_files,
            watch_root,
        }
    }

    fn names(source: &Source) -> Vec<String> {
        source
            .read()
            .unwrap()
            .into_iter()
            .map(|file| file.name)
            .collect()
    }

    /// The limit of the one rule in force; `None` without rules.
    fn limit(rules: &Rules) -> Option<u32> {
        let current = rules.current();
        let domain = current.as_deref()?.domains().next()?;
        domain
            .rules()
            .next()?
            .limits
            .first()
            .map(|limit| limit.requests)
    }

    fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < Duration::from_secs(20), "{what}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn watched(source: Source) -> (Rules, WatchGuard) {
        let rules = Rules::new(source, compile::Options::default());
        rules.load();
        let guard = watch(rules.clone());
        (rules, guard)
    }

    fn directory() -> (TempDir, Source) {
        let directory = tempfile::tempdir().unwrap();
        let source = Source::Paths(vec![directory.path().to_owned()]);
        (directory, source)
    }

    #[test]
    fn files_are_named_and_chosen_as_in_the_reference() {
        let root = tempfile::tempdir().unwrap();
        for name in [
            "sub/config/b.yaml",
            "sub/config/deep/a.txt",
            "sub/config/.hidden",
            "sub/other.yaml",
            "sub/config.c",
            "sub/config/..data/b.yaml",
        ] {
            put(root.path(), name, "x");
        }
        symlink("b.yaml", root.path().join("sub/config/link.yaml")).unwrap();
        symlink("deep", root.path().join("sub/config/linked")).unwrap();
        assert_eq!(
            names(&runtime(root.path(), true, true)),
            [
                "config.b.yaml",
                "config.c",
                "config.deep.a.txt",
                "config.link.yaml"
            ]
        );
        assert_eq!(
            names(&runtime(root.path(), true, false)),
            [
                "config..hidden",
                "config.b.yaml",
                "config.c",
                "config.deep.a.txt",
                "config.link.yaml"
            ]
        );
        assert_eq!(
            names(&runtime(root.path(), false, true)),
            ["b.yaml", "deep.a.txt", "link.yaml"]
        );
        let nothing = Source::Runtime {
            root: root.path().to_owned(),
            subdirectory: PathBuf::new(),
            app_directory: "config".into(),
            ignore_dot_files: true,
            watch_root: true,
        };
        assert_eq!(names(&nothing), [""; 0]);
    }

    #[test]
    fn named_paths_leave_out_what_editors_leave_behind() {
        let (directory, source) = directory();
        for name in [
            "a.yaml",
            "deep/b.yaml",
            ".a.yaml.swp",
            "a.yaml~",
            "#a.yaml#",
            "c.swp",
        ] {
            put(directory.path(), name, "x");
        }
        let path = |name| directory.path().join(name).display().to_string();
        assert_eq!(names(&source), [path("a.yaml"), path("deep/b.yaml")]);
        let file = Source::Paths(vec![directory.path().join("a.yaml~")]);
        assert_eq!(names(&file), [path("a.yaml~")], "unless they are named");
    }

    #[test]
    fn what_cannot_be_read_fails_the_load_and_keeps_the_rules() {
        let (directory, source) = directory();
        put(directory.path(), "a.yaml", &rule(1));
        let rules = Rules::new(source, compile::Options::default());
        assert_eq!(rules.load(), Outcome::Loaded);
        fs::write(directory.path().join("b.yaml"), b"domain: \xff").unwrap();
        assert_eq!(rules.load(), Outcome::Failed);
        let error = rules.status().error.unwrap();
        assert!(
            error.contains("b.yaml") && error.contains("UTF-8"),
            "{error}"
        );
        assert_eq!(
            rules.load(),
            Outcome::Unchanged,
            "and is not reported twice"
        );
        fs::remove_file(directory.path().join("b.yaml")).unwrap();
        symlink("nowhere", directory.path().join("c.yaml")).unwrap();
        assert_eq!(rules.load(), Outcome::Failed);
        assert_eq!(limit(&rules), Some(1));
        fs::remove_file(directory.path().join("c.yaml")).unwrap();
        rules.load();
        let status = rules.status();
        assert_eq!(
            (status.error, status.loads_ok, status.loads_failed),
            (None, 2, 2)
        );
    }

    #[test]
    fn only_changes_are_loaded_and_told() {
        let (directory, source) = directory();
        put(directory.path(), "a.yaml", &rule(1));
        let rules = Rules::new(source, compile::Options::default());
        let told = Arc::new(AtomicUsize::new(0));
        rules.on_change({
            let told = Arc::clone(&told);
            move || {
                told.fetch_add(1, Relaxed);
            }
        });
        assert_eq!(
            (rules.load(), rules.load()),
            (Outcome::Loaded, Outcome::Unchanged)
        );
        put(directory.path(), "a.yaml", "domain: [");
        assert_eq!(
            (rules.load(), rules.load()),
            (Outcome::Failed, Outcome::Unchanged)
        );
        // Back to what is in force: that repairs the status, too.
        put(directory.path(), "a.yaml", &rule(1));
        assert_eq!(
            (rules.load(), rules.status().error),
            (Outcome::Loaded, None)
        );
        assert_eq!(told.load(Relaxed), 2);
    }

    #[test]
    fn every_way_to_change_a_file_is_seen() {
        let (directory, source) = directory();
        put(directory.path(), "a.yaml", &rule(1));
        let (rules, _guard) = watched(source);
        assert_eq!(limit(&rules), Some(1));
        put(directory.path(), "a.yaml", &rule(2));
        wait_until("written in place", || limit(&rules) == Some(2));
        put(directory.path(), ".new", &rule(3));
        fs::rename(
            directory.path().join(".new"),
            directory.path().join("a.yaml"),
        )
        .unwrap();
        wait_until("renamed over", || limit(&rules) == Some(3));
        fs::remove_file(directory.path().join("a.yaml")).unwrap();
        wait_until("removed", || limit(&rules).is_none());
        put(directory.path(), "new/b.yaml", &rule(4));
        wait_until("made in a new directory", || limit(&rules) == Some(4));
        put(directory.path(), "new/b.yaml", &rule(5));
        wait_until("written there", || limit(&rules) == Some(5));
        put(
            directory.path(),
            "new/b.yaml",
            "domain: d\ndescriptors:\n- {key: k, rate_",
        );
        wait_until("half a file", || rules.status().error.is_some());
        assert_eq!(limit(&rules), Some(5));
        put(directory.path(), "new/b.yaml", &rule(6));
        wait_until("and the rest of it", || {
            limit(&rules) == Some(6) && rules.status().error.is_none()
        });
    }

    #[test]
    fn a_swapped_root_is_seen() {
        let top = tempfile::tempdir().unwrap();
        for (version, requests) in [("v1", 1), ("v2", 2)] {
            put(
                top.path(),
                &format!("{version}/sub/config/a.yaml"),
                &rule(requests),
            );
        }
        let current = top.path().join("current");
        symlink("v1", &current).unwrap();
        let (rules, _guard) = watched(runtime(&current, true, false));
        assert_eq!(limit(&rules), Some(1));
        symlink("v2", top.path().join("next")).unwrap();
        fs::rename(top.path().join("next"), &current).unwrap();
        wait_until("the second version", || limit(&rules) == Some(2));
        put(top.path(), "v2/sub/config/a.yaml", &rule(3));
        wait_until("a change in it", || limit(&rules) == Some(3));
    }

    #[test]
    fn a_directory_that_comes_later_is_read() {
        let top = tempfile::tempdir().unwrap();
        let root = top.path().join("later");
        let (rules, _guard) = watched(runtime(&root, false, true));
        let error = rules.status().error.unwrap();
        assert!(error.contains("later/sub/config"), "{error}");
        put(&root, "sub/config/a.yaml", &rule(7));
        wait_until("the rules", || limit(&rules) == Some(7));
        fs::remove_dir_all(&root).unwrap();
        wait_until("a failed load", || rules.status().error.is_some());
        assert_eq!(
            limit(&rules),
            Some(7),
            "rules stay when their directory goes"
        );
        put(&root, "sub/config/a.yaml", &rule(8));
        wait_until("the rules once more", || limit(&rules) == Some(8));
    }

    #[test]
    fn domains_that_were_looked_at_stay_so() {
        let (directory, source) = directory();
        put(directory.path(), "a.yaml", &domain("one", 1));
        let rules = Rules::new(source, compile::Options::default());
        rules.load();
        let looked_at = |rules: &Rules| {
            let current = rules.current();
            let rule = current
                .as_deref()
                .unwrap()
                .domain(b"one")
                .unwrap()
                .rules()
                .next()
                .unwrap();
            Arc::clone(&rule.looked_at)
        };
        looked_at(&rules).store(true, Relaxed);
        put(directory.path(), "a.yaml", &domain("one", 2));
        rules.load();
        assert!(looked_at(&rules).load(Relaxed));
    }
}
