//! Stand-in for reading, so that the command line can be built.

use std::{fs, io, path::PathBuf};

use super::file::SourceFile;

/// Where rules are.
#[derive(Clone, Debug)]
pub enum Source {
    /// In these files and directories.
    Paths(Vec<PathBuf>),
}

impl Source {
    /// All files.
    pub fn read(&self) -> io::Result<Vec<SourceFile>> {
        let Self::Paths(paths) = self;
        let mut files = Vec::new();
        for path in paths {
            let with_path =
                |error| io::Error::other(format!("can't read {}: {error}", path.display()));
            let paths = if path.is_dir() {
                let entries = fs::read_dir(path).map_err(with_path)?;
                entries
                    .map(|entry| Ok(entry?.path()))
                    .collect::<io::Result<_>>()?
            } else {
                vec![path.clone()]
            };
            for path in paths {
                files.push(SourceFile {
                    name: path.display().to_string(),
                    text: fs::read_to_string(&path).map_err(with_path)?,
                });
            }
        }
        Ok(files)
    }
}
