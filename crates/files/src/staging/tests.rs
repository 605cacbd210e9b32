//! Destinations that change while they are written.

use super::*;
use crate::ErrorKind;
use crate::jobs::Silent;

/// A scratch folder, and a destination in it.
struct Home {
    folder: tempfile::TempDir,
}

impl Home {
    fn new() -> Home {
        Home { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn put(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// A write of `text` to `name` that is ready to be published.
    fn stage(&self, name: &str, text: &str, force: bool) -> Staging {
        let is_file = name.ends_with(".safetensors");
        let staging = Staging::new(&self.path(name), is_file, force, &[]).unwrap();
        let file = staging.folder().join(staging.file_name().unwrap_or("model.safetensors"));
        fs::write(file, text).unwrap();
        staging
    }

    /// Asserts that nothing but these paths is there.
    #[track_caller]
    fn holds(&self, expected: &[&str]) {
        let found: Vec<PathBuf> = snapshot(self.folder.path()).unwrap().into_keys().skip(1).collect();
        assert_eq!(found, expected.iter().map(PathBuf::from).collect::<Vec<_>>());
    }
}

#[track_caller]
fn refused(result: Result<()>, words: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn a_destination_that_appears_during_the_work_is_left_as_it_is() {
    for force in [false, true] {
        let home = Home::new();
        let (folder, file) = (home.stage("dst", "new", force), home.stage("x.safetensors", "new", force));
        home.put("dst/model.safetensors", "other");
        home.put("x.safetensors", "other");
        refused(folder.commit(&Silent), "dst was created or filled by another process");
        refused(file.commit(&Silent), "x.safetensors was created or filled");
        assert_eq!(
            (home.text("dst/model.safetensors"), home.text("x.safetensors")),
            ("other".into(), "other".into())
        );
        home.holds(&["dst", "dst/model.safetensors", "x.safetensors"]);
    }
}

#[test]
fn of_two_writes_to_one_destination_exactly_one_is_published() {
    for name in ["dst", "x.safetensors"] {
        let home = Home::new();
        let (first, second) = (home.stage(name, "first", false), home.stage(name, "second", false));
        second.commit(&Silent).unwrap();
        refused(first.commit(&Silent), "by another process");
        let (file, count) = if name == "dst" { ("dst/model.safetensors", 3) } else { (name, 2) };
        assert_eq!(home.text(file), "second");
        assert_eq!(snapshot(home.folder.path()).unwrap().len(), count);
    }
}

#[test]
fn an_empty_folder_is_filled_unless_another_process_fills_it_first() {
    let home = Home::new();
    fs::create_dir(home.path("dst")).unwrap();
    let (first, second) = (home.stage("dst", "first", false), home.stage("dst", "second", false));
    first.commit(&Silent).unwrap();
    refused(second.commit(&Silent), "created or filled by another process");
    assert_eq!(home.text("dst/model.safetensors"), "first");
    home.holds(&["dst", "dst/model.safetensors"]);
    fs::create_dir(home.path("x.safetensors")).unwrap();
    home.stage("x.safetensors", "file", false).commit(&Silent).unwrap();
    assert_eq!(home.text("x.safetensors"), "file");
}

#[test]
fn force_replaces_only_what_was_checked() {
    for change in ["dst/notes.txt", "dst/model.safetensors"] {
        let home = Home::new();
        home.put("dst/model.safetensors", "old");
        let staging = home.stage("dst", "new", true);
        home.put(change, "changed");
        refused(staging.commit(&Silent), "dst was changed by another process");
        assert_eq!(home.text(change), "changed");
        assert!(home.path("dst/model.safetensors").exists());
        assert_eq!(fs::read_dir(home.folder.path()).unwrap().count(), 1);
    }
    let home = Home::new();
    home.put("x.safetensors", "old");
    let (first, second) =
        (home.stage("x.safetensors", "first", true), home.stage("x.safetensors", "2nd", true));
    second.commit(&Silent).unwrap();
    refused(first.commit(&Silent), "x.safetensors was changed by another process");
    assert_eq!(home.text("x.safetensors"), "2nd");
    home.holds(&["x.safetensors"]);
}

#[test]
fn where_nothing_can_be_exchanged_the_old_destination_waits_for_the_new_one() {
    let home = Home::new();
    home.put("dst/model.safetensors", "old");
    let staging = home.stage("dst", "new", true);
    refused(staging.replace_in_steps(&|_| false), "dst was changed by another process");
    assert_eq!(home.text("dst/model.safetensors"), "old");
    // The new one cannot be published: the old one is restored.
    let moved = home.path("away");
    fs::rename(staging.staged(), &moved).unwrap();
    assert!(staging.replace_in_steps(&|_| true).is_err());
    assert_eq!(home.text("dst/model.safetensors"), "old");
    fs::rename(&moved, staging.staged()).unwrap();
    staging.replace_in_steps(&|_| true).unwrap();
    assert_eq!(home.text("dst/model.safetensors"), "new");
    drop(staging);
    home.holds(&["dst", "dst/model.safetensors"]);
}

#[test]
fn an_old_destination_whose_place_was_taken_is_kept_beside_it() {
    let home = Home::new();
    home.put("dst/model.safetensors", "old");
    let staging = home.stage("dst", "new", true);
    let take_its_place = |_: &Path| {
        home.put("dst/model.safetensors", "of another");
        true
    };
    refused(
        staging.replace_in_steps(&take_its_place),
        "another process created this path while it was replaced",
    );
    drop(staging);
    assert_eq!(home.text("dst/model.safetensors"), "of another");
    assert_eq!(home.text(&format!("ballast-displaced-{}/model.safetensors", std::process::id())), "old");
}

#[test]
fn a_name_of_255_bytes_can_be_written_and_replaced() {
    let home = Home::new();
    for name in ["n".repeat(255), format!("{}.safetensors", "n".repeat(243)), "n".repeat(240)] {
        home.stage(&name, "old", false).commit(&Silent).unwrap();
        home.stage(&name, "new", true).commit(&Silent).unwrap();
        let path = if name.ends_with("s") { name.clone() } else { format!("{name}/model.safetensors") };
        assert_eq!(home.text(&path), "new");
    }
    assert_eq!(fs::read_dir(home.folder.path()).unwrap().count(), 3);
}

/// Creates a write of these files to `dst`, an empty folder treated as a mount point.
fn stage_inside(home: &Home, files: &[&str]) -> Staging {
    let target = home.path("dst");
    let hidden = Hidden::create(&target, OsStr::new("dst")).unwrap();
    let staged = hidden.path.join(NEW);
    fs::create_dir(&staged).unwrap();
    for file in files {
        fs::create_dir_all(staged.join(file).parent().unwrap()).unwrap();
        fs::write(staged.join(file), "new").unwrap();
    }
    let before = look(&target, true, false, false).unwrap();
    assert!(matches!(before, Before::EmptyMountPoint));
    Staging { target, before, hidden, staged, is_file: false, _created: CreatedFolders(Vec::new()) }
}

#[test]
fn of_two_writes_to_an_empty_mount_point_exactly_one_is_published() {
    let home = Home::new();
    fs::create_dir_all(home.path("dst/lost+found")).unwrap();
    let first = stage_inside(&home, &["config.json", "model.safetensors"]);
    let second = stage_inside(&home, &["mp_rank_00/model.safetensors", "mp_rank_01/model.safetensors"]);
    second.commit(&Silent).unwrap();
    refused(first.commit(&Silent), "dst was created or filled by another process");
    home.holds(&[
        "dst",
        "dst/lost+found",
        "dst/mp_rank_00",
        "dst/mp_rank_00/model.safetensors",
        "dst/mp_rank_01",
        "dst/mp_rank_01/model.safetensors",
    ]);
}

#[test]
fn entries_move_to_a_mount_point_in_an_order_that_never_looks_whole_before_it_is() {
    let mut names = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "mp_rank_00",
        "mp_rank_01",
        "tokenizer.json",
    ]
    .map(OsString::from);
    sort_for_publishing(&mut names);
    let expected = [
        "model.safetensors.index.json",
        "tokenizer.json",
        "mp_rank_01",
        "mp_rank_00",
        "model-00002-of-00002.safetensors",
        "model-00001-of-00002.safetensors",
        "config.json",
    ];
    assert_eq!(names, expected.map(OsString::from));
}

#[test]
fn a_mount_point_that_cannot_take_every_entry_gets_none() {
    let home = Home::new();
    fs::create_dir(home.path("dst")).unwrap();
    let staging = stage_inside(&home, &["config.json", "model.safetensors", "tokenizer.json"]);
    // The last entry is missing and cannot be moved.
    let names = ["tokenizer.json", "model.safetensors", "no-such-file"].map(OsString::from);
    assert!(staging.move_in(&names).is_err());
    assert!(entries(&home.path("dst"), true).unwrap().is_empty());
    staging.commit(&Silent).unwrap();
    home.holds(&["dst", "dst/config.json", "dst/model.safetensors", "dst/tokenizer.json"]);
}

#[test]
fn a_cancelled_write_leaves_the_destination_as_it_is() {
    struct Cancelled;
    impl Observer for Cancelled {
        fn cancelled(&self) -> bool {
            true
        }
    }
    let home = Home::new();
    fs::create_dir(home.path("empty")).unwrap();
    home.put("old/model.safetensors", "old");
    home.put("old.safetensors", "old");
    let names = ["new", "new.safetensors", "empty", "old", "old.safetensors"];
    let mounted = Home::new();
    fs::create_dir(mounted.path("dst")).unwrap();
    let writes = names.map(|name| home.stage(name, "new", true));
    for staging in writes.into_iter().chain([stage_inside(&mounted, &["config.json"])]) {
        let error = staging.commit(&Cancelled).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
    }
    home.holds(&["empty", "old", "old/model.safetensors", "old.safetensors"]);
    assert_eq!(
        (home.text("old/model.safetensors"), home.text("old.safetensors")),
        ("old".into(), "old".into())
    );
    mounted.holds(&["dst"]);
}
