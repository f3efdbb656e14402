//! What the boxes of a protocol have if a request does not say otherwise.

use box_protocol::{Defaults, Env, Guest, SpecDraft};

/// The settings that the clients of a protocol expect in every box.
#[derive(Debug, Clone, Copy, Default)]
pub struct Preset {
    /// Name and home directory of the guest user.
    pub guest: Option<(&'static str, &'static str)>,
    /// Directories that exist from the start.
    pub dirs: &'static [&'static str],
    /// Environment variables of all commands.
    pub env: &'static [(&'static str, &'static str)],
    /// A file in the box with further environment variables.
    pub env_file: Option<&'static str>,
    /// The working directory of commands.
    pub cwd: Option<&'static str>,
}

impl Preset {
    /// Fills in what a request leaves unset; its own variables win.
    pub fn apply(&self, spec: &mut SpecDraft) {
        if let (None, Some((name, home))) = (&spec.guest, self.guest) {
            spec.guest = Some(Guest {
                name: name.to_owned(),
                home: home.to_owned(),
            });
        }
        let dirs = spec.dirs.get_or_insert_default();
        for dir in self.dirs {
            if !dirs.iter().any(|known| known == dir) {
                dirs.push((*dir).to_owned());
            }
        }
        let defaults = spec.defaults.get_or_insert_with(Defaults::default);
        let mut env = Env::new();
        for (name, value) in self.env {
            // The names are constants that follow the rules.
            let _ = env.insert(*name, *value);
        }
        env.extend(std::mem::take(&mut defaults.env));
        defaults.env = env;
        if defaults.env_file.is_none() {
            defaults.env_file = self.env_file.map(str::to_owned);
        }
        if defaults.cwd.is_none() {
            defaults.cwd = self.cwd.map(str::to_owned);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_overrides_its_preset() {
        let preset = Preset {
            guest: Some(("user", "/home/user")),
            dirs: &["/data"],
            env: &[("A", "preset"), ("B", "preset")],
            env_file: None,
            cwd: Some("/home/user"),
        };
        let mut spec = SpecDraft::new("b");
        let mut defaults = Defaults::default();
        defaults.env.insert("B", "request").unwrap();
        spec.defaults = Some(defaults);
        spec.dirs = Some(vec!["/data".to_owned(), "/own".to_owned()]);
        preset.apply(&mut spec);
        let defaults = spec.defaults.as_ref().unwrap();
        assert_eq!(defaults.env["A"], "preset");
        assert_eq!(defaults.env["B"], "request");
        assert_eq!(defaults.cwd.as_deref(), Some("/home/user"));
        assert_eq!(spec.dirs.as_ref().unwrap().len(), 2);
        assert_eq!(spec.guest.as_ref().unwrap().name, "user");
        spec.build().unwrap();
    }
}
