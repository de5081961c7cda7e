//! Stand-in for the compiler, so that the command line can be built: it sees only whether a file is YAML,
//! and warns of a `unit` beside a `key`.

use super::{
    RuleSet,
    file::SourceFile,
    problem::{Problem, Problems},
};

/// How to compile.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Several files may add to one domain.
    pub merge_domains: bool,
}

/// What comes of it.
#[derive(Debug)]
pub struct Compiled {
    /// The rules.
    pub rules: RuleSet,
    /// What is only probably wrong.
    pub warnings: Vec<Problem>,
}

/// Refuses what is no YAML.
pub fn compile(
    files: &[SourceFile],
    _: Options,
    _: Option<&RuleSet>,
) -> Result<Compiled, Problems> {
    let problems = files.iter().filter_map(|file| {
        let error = serde_yaml::from_str::<serde_yaml::Value>(&file.text).err()?;
        Some(Problem {
            file: file.name.clone(),
            message: error.to_string(),
        })
    });
    match problems.collect::<Vec<_>>() {
        problems if problems.is_empty() => Ok(Compiled {
            rules: RuleSet::default(),
            warnings: files.iter().filter_map(warning).collect(),
        }),
        problems => Err(Problems(problems)),
    }
}

fn warning(file: &SourceFile) -> Option<Problem> {
    let text: serde_yaml::Value = serde_yaml::from_str(&file.text).ok()?;
    let descriptors = text.get("descriptors")?.as_sequence()?;
    descriptors
        .iter()
        .any(|descriptor| descriptor.get("unit").is_some())
        .then(|| Problem {
            file: file.name.clone(),
            message: "unit has no effect here".into(),
        })
}
